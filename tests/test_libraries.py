import sys
import time
import types
import warnings

import pytest
import torch

from jupyter_gpumem.holders import Holder
from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Shell

MIB = 1 << 20
SETUP = """
%load_ext jupyter_gpumem
import functools, sys, time, torch, types, warnings
def keeping():
    kept = torch.ones(1 << 18, device="cuda")
    return lambda *_, **__: kept
"""


def only_holder(shell: Shell, code: str) -> Holder:
    shell.run(SETUP)
    shell.run(code)
    (holder,) = find_leaks(shell.ip).holders
    assert holder.keeps_bytes == MIB
    return holder


@pytest.mark.parametrize(
    ("owner", "name", "path"),
    [
        (torch.nn.functional, "relu", "torch.nn.functional.relu"),
        (warnings, "showwarning", "warnings.showwarning"),
        (time, "sleep", "time.sleep"),  # set from C, as that of torch below
        (torch, "relu", "torch.relu"),
        (torch.nn.Linear, "forward", "torch.nn.modules.linear.Linear.forward"),
    ],
)
def test_a_function_in_a_librarys_module_or_class_is_not_deleted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, path: str
) -> None:
    monkeypatch.setattr(owner, name, getattr(owner, name))  # back afterwards, whatever the cell does
    holder = only_holder(shell, f"{path} = keeping()")
    assert holder.path == f"kept in the closure of {path}"
    assert holder.remedy == ""
    assert holder.note == "it stands in a library: set back what was there, or delete it where nothing was"


def test_data_that_a_program_keeps_in_a_librarys_module_goes(shell: Shell) -> None:
    holder = only_holder(shell, "torch.my_own_extra = keeping()()")
    assert shell.run(holder.remedy).error is None
    assert not hasattr(torch, "my_own_extra")
    assert find_leaks(shell.ip).holders == ()


def test_what_a_program_keeps_in_its_own_module_and_class_goes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpumem_own", types.ModuleType("gpumem_own"))
    holder = only_holder(shell, "sys.modules['gpumem_own'].f = keeping()")
    assert shell.run(holder.remedy).error is None
    holder = only_holder(shell, "class Own:\n    forward = keeping()")
    assert shell.run(holder.remedy).error is None
    assert find_leaks(shell.ip).holders == ()
