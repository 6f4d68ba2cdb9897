"""Counts from the text of programs, on lines as XLA writes them; each has what one rule is about."""

import textwrap

import pytest

from benchmarks.accelerators import hlo

MEGABYTE = 2**20
F = "f32[512,512]{1,0:T(8,128)}"  # one megabyte, in HBM
V = "f32[512,512]{1,0:T(8,128)S(1)}"  # the same, in VMEM
HALF = "f32[256,512]{1,0:T(8,128)}"


def program(entry, *others):
    """The text of a program with these lines, and other computations."""
    body = textwrap.indent(textwrap.dedent(entry).strip(), "  ")
    rest = "\n".join(textwrap.dedent(x).strip() + "\n" for x in others)
    return f"HloModule jit_f, is_scheduled=true\n\n{rest}\nENTRY %main.1 (x: f32[512,512]) -> f32[512,512] {{\n{body}\n}}\n"


def counted(entry, *others):
    found = hlo.traffic(program(entry, *others))
    return found.bytes / MEGABYTE, found


NEGATE = """
    %fused_negate (param_0: f32[512,512]) -> f32[512,512] {
      %param_0 = f32[512,512]{1,0:T(8,128)} parameter(0)
      ROOT %neg = f32[512,512]{1,0:T(8,128)} negate(%param_0), metadata={op_name="jit(f)/neg (x)"}
    }"""


@pytest.mark.parametrize(("operand", "result", "expected"), [(F, V, 1), (V, F, 1), (V, V, 0)])
def test_what_is_in_vmem_is_not_counted(operand, result, expected):
    moved, found = counted(
        f"""
        %x = {operand} parameter(0)
        ROOT %fusion = {result} fusion(%x), kind=kLoop, calls=%fused_negate
        """,
        NEGATE,
    )
    assert moved == expected
    assert found.kernels == 1


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("f32", 4), ("bf16", 2), ("s8", 1), ("pred", 1), ("u4", 0.5), ("f8e4m3fn", 1), ("c64", 8)],
)
def test_sizes_of_dtypes(dtype, size):
    kind = f"{dtype}[1024,1024]{{1,0}}"
    moved, _ = counted(f"%x = {kind} parameter(0)\nROOT %copy = {kind} copy(%x)")
    assert moved == 2 * size


def test_a_fusion_of_slices_reads_these():
    """Of a third of the array, in two parts; one behind a bitcast."""
    moved, _ = counted(
        """
        %x = f32[1536,512]{1,0} parameter(0)
        ROOT %fusion = f32[256,512]{1,0} fusion(%x), kind=kLoop, calls=%fused_slices
        """,
        """
        %fused_slices (param_0: f32[1536,512]) -> f32[256,512] {
          %param_0 = f32[1536,512]{1,0} parameter(0)
          %first = f32[256,512]{1,0} slice(%param_0), slice={[0:256], [0:512]}
          %bitcast = f32[6,256,512]{2,1,0} bitcast(%param_0)
          %second = f32[1,256,512]{2,1,0} slice(%bitcast), slice={[4:5], [0:256], [0:512]}
          %flat = f32[256,512]{1,0} bitcast(%second)
          ROOT %add = f32[256,512]{1,0} add(%first, %flat)
        }""",
    )
    assert moved == 0.5 + 0.5 + 0.5


def test_slices_and_the_whole_are_the_whole():
    moved, _ = counted(
        f"""
        %x = {F} parameter(0)
        ROOT %fusion = {F} fusion(%x), kind=kLoop, calls=%fused
        """,
        f"""
        %fused (param_0: f32[512,512]) -> f32[512,512] {{
          %param_0 = {F} parameter(0)
          %first = {HALF} slice(%param_0), slice={{[0:256], [0:512]}}
          %zero = f32[] constant(0)
          %pad = {F} pad(%first, %zero), padding=0_256x0_0
          ROOT %add = {F} add(%param_0, %pad)
        }}""",
    )
    assert moved == 2


def test_asynchronous_copies_count_once():
    """To VMEM one side counts, and parts that are joined there are moved by no kernel."""
    moved, found = counted(
        f"""
        %x = {F} parameter(0)
        %copy-start = ({V}, {F}, u32[]{{:S(2)}}) copy-start(%x)
        %slice-start = (({F}), f32[256,512]{{1,0:T(8,128)S(1)}}, s32[]{{:S(2)}}) slice-start(%x), slice={{[0:256], [0:512]}}
        %copy-done = {V} copy-done(%copy-start)
        %slice-done = f32[256,512]{{1,0:T(8,128)S(1)}} slice-done(%slice-start)
        ROOT %joined = {V} custom-call(%slice-done, %slice-done), custom_call_target="ConcatBitcast"
        """
    )
    assert moved == 1 + 0.5
    assert found.kernels == found.copied == 0


def test_a_fusion_that_computes_nothing_is_a_copy():
    moved, found = counted(
        f"""
        %x = {HALF} parameter(0)
        %joined = {F} fusion(%x), kind=kLoop, calls=%fused_join
        ROOT %neg = {F} fusion(%joined), kind=kLoop, calls=%fused_negate
        """,
        NEGATE,
        f"""
        %fused_join (param_0: f32[256,512]) -> f32[512,512] {{
          %param_0 = {HALF} parameter(0)
          ROOT %join = {F} concatenate(%param_0, %param_0), dimensions={{0}}
        }}""",
    )
    assert moved == 3.5
    assert found.copied == 1.5 * MEGABYTE
    assert found.kernels == 2


def branches(which):
    return (
        f"""
        %x = {F} parameter(0)
        %which = s32[] parameter(1)
        ROOT %cond = {F} conditional(%which, %x, %x), {which}, metadata={{op_name="cond"}}
        """,
        NEGATE,
        f"""
        %dear (arg.1: f32[512,512]) -> f32[512,512] {{
          %arg.1 = {F} parameter(0)
          %once = {F} fusion(%arg.1), kind=kLoop, calls=%fused_negate
          ROOT %twice = {F} fusion(%once), kind=kLoop, calls=%fused_negate
        }}""",
        f"""
        %cheap (arg.2: f32[512,512]) -> f32[512,512] {{
          %arg.2 = {F} parameter(0)
          ROOT %once = {F} fusion(%arg.2), kind=kLoop, calls=%fused_negate
        }}""",
    )


@pytest.mark.parametrize(
    "which",
    [
        "branch_computations={%dear, %cheap}",
        "branch_computations={%cheap, %dear}",
        "true_computation=%dear, false_computation=%cheap",
    ],
)
def test_of_branches_the_cheapest(which):
    moved, found = counted(*branches(which))
    assert moved == 2
    assert found.rare == 2 * MEGABYTE
    assert found.kernels == 2  # the choice is one


@pytest.mark.parametrize("known", ["by XLA", "by the condition"])
def test_the_body_of_a_loop_counts_as_often_as_it_runs(known):
    said = ', backend_config={"known_trip_count":{"n":"5"}}' if known == "by XLA" else ""
    end = 9 if known == "by XLA" else 5
    kind = f"(s32[], {F})"
    moved, found = counted(
        f"""
        %x = {F} parameter(0)
        %zero = s32[] constant(0)
        %start = {kind} tuple(%zero, %x)
        %loop = {kind} while(%start), condition=%goes_on, body=%once{said}
        ROOT %y = {F} get-tuple-element(%loop), index=1
        """,
        NEGATE,
        f"""
        %goes_on (arg.1: (s32[], f32[512,512])) -> pred[] {{
          %arg.1 = {kind} parameter(0)
          %i.1 = s32[] get-tuple-element(%arg.1), index=0
          %end = s32[] constant({end})
          ROOT %lt = pred[] compare(%i.1, %end), direction=LT
        }}""",
        f"""
        %once (arg.2: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {{
          %arg.2 = {kind} parameter(0)
          %i.2 = s32[] get-tuple-element(%arg.2), index=0
          %y.2 = {F} get-tuple-element(%arg.2), index=1
          %one = s32[] constant(1)
          %next = s32[]{{:S(6)}} add(%i.2, %one)
          %z = {F} fusion(%y.2), kind=kLoop, calls=%fused_negate
          ROOT %out = {kind} tuple(%next, %z)
        }}""",
    )
    assert found.kernels == 5
    assert moved == pytest.approx(10, abs=0.001)  # and the counter


def test_collectives_by_place():
    """In several fusions one chain is one collective; a branch has those of its loops, too."""

    def fused(name, chain):
        attributes = f'frontend_attributes={{chain_id="{chain}"}}' if chain else "dimensions={0}"
        return f"""
        %{name} (param_0: f32[512,512]) -> f32[512,512] {{
          %param_0 = {F} parameter(0)
          ROOT %gather-{name} = {F} all-gather(%param_0), channel_id=1, {attributes}
        }}"""

    def branch(name, loop):
        return f"""
        %{name} (param: f32[512,512]) -> f32[512,512] {{
          %param = {F} parameter(0)
          ROOT %{name}-result = {F} {loop}
        }}"""

    text = program(
        f"""
        %x = {F} parameter(0)
        %on = pred[] parameter(1)
        %start = {F} fusion(%x), kind=kCustom, calls=%begins
        %done = {F} fusion(%start), kind=kCustom, calls=%ends
        %other = {F} fusion(%done), kind=kCustom, calls=%another
        %last = {F} all-gather(%other), channel_id=1, dimensions={{0}}
        ROOT %if = {F} conditional(%on, %last, %x), branch_computations={{%turned, %kept}}
        """,
        *(fused(name, chain) for name, chain in {"begins": 1, "ends": 1, "another": 2}.items()),
        fused("in_loop", None),
        branch("turned", "while(%param), condition=%in_loop, body=%in_loop"),
        branch("kept", "copy(%param)"),
    )
    assert hlo.collectives(text) == {"all-gather": 5}
    found = hlo.collectives_by_place(text)
    assert found == ({"all-gather": 3}, [{"all-gather": 1}])
