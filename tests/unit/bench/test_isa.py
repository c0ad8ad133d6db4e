"""A process that is restricted to AVX2 sees nothing newer; a machine that cannot do so says it."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest

from bench.isa import ISAS, restrict
from fedvit.errors import FedvitError
from tests.support.children import run_child
from tests.support.codes import has_code

_FEATURES = "import json, numpy; print(json.dumps(numpy._core._multiarray_umath.__cpu_features__))"


@pytest.mark.parametrize("isa", ISAS)
def test_libraries_see_avx2_alone(isa: str, tmp_path: Path) -> None:
    if "cpuid_fault" not in Path("/proc/cpuinfo").read_text() or platform.machine() != "x86_64":
        with pytest.raises(FedvitError, check=has_code("FV0002")):
            restrict(isa, tmp_path)
        return
    environment = {**os.environ, **restrict(isa, tmp_path)}
    done = run_child([sys.executable, "-c", _FEATURES], env=environment, check=True)
    seen = {name for name, is_there in json.loads(done.stdout).items() if is_there}
    assert {"AVX2", "FMA3"} <= seen
    assert not {name for name in seen if name.startswith(("AVX512", "X86_V4"))}


def test_a_machine_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FedvitError, check=has_code("FV0002")):
        restrict("avx2", tmp_path)
