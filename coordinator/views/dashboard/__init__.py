"""The dashboard: a process of its own that shows the record, the status files and the registry in a browser.

It reads them, and writes nothing but what an operator asks for with the password. Nothing of a run depends on it.
"""
