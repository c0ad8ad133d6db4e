"""timm is imported without torch's compiler, which is there all the same for what needs it."""

import subprocess
import sys

import pytest

CODE = """
import sys
from fedvit.models import SMALL, build_vit, light_timm
import torch
import torchvision

compiler = "torch._dynamo"
build_vit(SMALL, 3, seed=0).vit(torch.zeros(1, 3, 32, 32))
assert compiler not in sys.modules, "a model needs none"

# a package that asks for more than timm does while it is imported
sys.modules[compiler] = light_timm._Later(compiler)
from torch._dynamo import config
assert config.recompile_limit
assert type(sys.modules[compiler]) is not light_timm._Later

def twice(x):
    return 2 * x

assert torch.compile(twice, backend="eager", fullgraph=True)(torch.ones(1)) == 2
assert torchvision.ops.roi_align(torch.zeros(1, 3, 8, 8), [torch.zeros(1, 4)], 2).shape == (1, 3, 2, 2)
"""


@pytest.mark.slow
def test_timm_is_imported_without_the_compiler_which_is_there_when_needed() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
