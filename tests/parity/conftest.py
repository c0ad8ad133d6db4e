"""Our numbers beside those of released code: FEDVIT_REFERENCE=DIR pytest tests/parity.

DIR has checkouts of github.com/imguangyu/FedPerfix (5acbd0c), zhyczy/FedTP (3cca0d7) and TsingZ0/PFLlib (d832e76), in
folders FedPerfix, FedTP and PFLlib. A file whose checkout is missing is not collected. FedTP's code needs einops.
"""

from tests.support.released import REFERENCE

collect_ignore = [
    file
    for folder, file in (("FedPerfix", "test_fedperfix.py"), ("FedTP", "test_fedtp.py"), ("PFLlib", "test_pfllib.py"))
    if not (REFERENCE / folder).is_dir()
]
