"""Imported last by the process that programs under test are forked from: none of them looks through what it imported.

A collection goes through half a million objects of torch, which takes 0.3 s, and more where each page that it touches
is copied for the forked process.
"""

import gc

gc.collect()
gc.freeze()
