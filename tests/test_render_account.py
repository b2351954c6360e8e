from jupyter_gpumem.next_step import NextStep
from jupyter_gpumem.parts import CUDA_NOT_STARTED, NOT_APART, Account, Neighbour, Part
from jupyter_gpumem.processes import ProcessName
from jupyter_gpumem.render.account import account_page
from jupyter_gpumem.render.layout import to_html, to_text

MIB = 1024**2
GIB = 1024**3


def training() -> Account:
    return Account(
        device=0,
        kind="cuda",
        label="GPU 0",
        name="NVIDIA L4",
        simulated=True,
        parts=(
            Part("parameters", "allocated", GIB, 148),
            Part("gradients", "allocated", GIB, 148),
            Part("optimizer_state", "allocated", 2 * GIB, 296, "AdamW"),
            Part("buffers", "allocated", 0, 0),
            Part("saved", "allocated", 3 * GIB, 100),
            Part("other_tensors", "allocated", GIB, 1),
            Part("rounding", "allocated", 12 * MIB),
            Part("workspaces", "allocated", 32 * MIB, 1),
            Part("unexplained", "allocated", 0, 0),
            Part("waiting", "reserved", 0),
            Part("returnable", "reserved", 200 * MIB),
            Part("fragmented", "reserved", 120 * MIB),
            Part("private_free", "reserved", 8 * MIB, 2),
            Part("context", "process", 460 * MIB),
            Part("others", "total", 3 * GIB),
            Part("free", "total", 24 * GIB - 11 * GIB - 832 * MIB),
        ),
        allocated_bytes=8 * GIB + 44 * MIB,
        reserved_bytes=8 * GIB + 372 * MIB,
        process_bytes=8 * GIB + 832 * MIB,
        total_bytes=24 * GIB,
        largest_free_bytes=64 * MIB,
        neighbours=(
            Neighbour(ProcessName(4242, "python train.py", "me", "/home/me/<b>.ipynb"), 2 * GIB),
            Neighbour(ProcessName(7), None),
        ),
        next_step=NextStep("4.00 GiB in tensors that are no part of a model", "%gpumem leaks", 4 * GIB),
    )


def test_the_account_reads_line_by_line() -> None:
    assert to_text(account_page([training()])).splitlines() == [
        "GPU 0   NVIDIA L4   24.0 GiB   simulated",
        "████████▓▓▓▓▓▓▓▓▓░░░░░░░░─────────────────────────",
        "  parameters              1.00 GiB   148 tensors",
        "  gradients               1.00 GiB   148 tensors",
        "  optimizer state         2.00 GiB   AdamW, 296 tensors",
        "  saved for backward      3.00 GiB   100 tensors",
        "  other tensors           1.00 GiB   1 tensor",
        "  rounding                12.0 MiB",
        "  library workspaces      32.0 MiB   cuBLAS, normal",
        "  unexplained                  0 B",
        "allocated                 8.04 GiB",
        "  cached, returnable       200 MiB",
        "  cached, in used parts    120 MiB   largest block 64.0 MiB",
        "  free in private pools   8.00 MiB   2 pools",
        "reserved                  8.36 GiB",
        "  context, libraries       460 MiB",
        "this process              8.81 GiB",
        "  other processes         3.00 GiB",
        "                          2.00 GiB   kernel of /home/me/<b>.ipynb (pid 4242)",
        "                           unknown   process (pid 7)",
        "  free                    12.2 GiB",
        "",
        "4.00 GiB in tensors that are no part of a model   → %gpumem leaks",
        "only a restart gives back the context: 460 MiB",
    ]


def test_the_html_escapes_names_and_gives_exact_bytes() -> None:
    page = to_html(account_page([training()]))
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert f"{8 * GIB + 44 * MIB:,} bytes" in page
    assert "of live nn.Modules" in page


def test_unknown_parts_are_words_and_there_is_no_bar_with_holes() -> None:
    account = Account(
        device=1,
        kind="cuda",
        label="GPU 1",
        name="",
        simulated=False,
        parts=(
            Part("tensors", "allocated", MIB),
            Part("cache", "reserved", MIB),
            Part("context", "process", None),
            Part("others", "total", None),
            Part("free", "total", None),
        ),
        allocated_bytes=MIB,
        reserved_bytes=2 * MIB,
        process_bytes=None,
        total_bytes=None,
        neighbours=(Neighbour(ProcessName(7), None),),
        notes=(NOT_APART,),
    )
    assert to_text(account_page([account])).splitlines() == [
        "GPU 1      unknown",
        "allocated              1.00 MiB",
        "  cached               1.00 MiB",
        "reserved               2.00 MiB",
        "  context, libraries    unknown",
        "this process            unknown",
        "  other processes       unknown",
        "  free                  unknown",
        "",
        NOT_APART,
    ]


def idle(device: int, others: int) -> Account:
    return Account(
        device=device,
        kind="cuda",
        label=f"GPU {device}",
        name="NVIDIA L4",
        simulated=False,
        parts=(
            Part("context", "process", 0),
            Part("others", "total", others),
            Part("free", "total", GIB - others),
        ),
        allocated_bytes=0,
        reserved_bytes=0,
        process_bytes=0,
        total_bytes=GIB,
        neighbours=(),
        notes=(CUDA_NOT_STARTED,),
    )


def test_before_cuda_starts_one_calm_sentence_says_so() -> None:
    assert to_text(account_page([idle(0, 0), idle(1, 0)])) == CUDA_NOT_STARTED


def test_before_cuda_starts_a_device_in_use_by_others_is_shown() -> None:
    assert to_text(account_page([idle(0, 0), idle(1, 512 * MIB)])).splitlines() == [
        CUDA_NOT_STARTED,
        "",
        "GPU 1   NVIDIA L4   1.00 GiB",
        "  other processes   512 MiB   by processes not visible from here",
        "  free              512 MiB",
    ]


def test_ram_has_its_own_words() -> None:
    account = Account(
        device=0,
        kind="host",
        label="RAM",
        name="memory of this process",
        simulated=False,
        parts=(
            Part("parameters", "allocated", MIB, 2),
            Part("rest", "process", MIB),
            Part("others", "total", MIB),
            Part("free", "total", MIB),
        ),
        allocated_bytes=MIB,
        reserved_bytes=None,
        process_bytes=2 * MIB,
        total_bytes=4 * MIB,
    )
    assert to_text(account_page([account])).splitlines() == [
        "RAM   memory of this process   4.00 MiB",
        "████████████░░░░░░░░░░░░░░░░░░░░░░░░░░────────────",
        "  parameters             1.00 MiB   2 tensors",
        "tensors                  1.00 MiB",
        "  rest of this process   1.00 MiB",
        "this process             2.00 MiB",
        "  other processes        1.00 MiB",
        "  free                   1.00 MiB",
    ]
