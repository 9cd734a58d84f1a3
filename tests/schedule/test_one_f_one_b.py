import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import gpipe, one_f_one_b, peak_activations
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f, i, w):
    measured = step(one_f_one_b(num_stages, m), costs(f, i, w))
    assert measured == m * (f + i + w) + (num_stages - 1) * (f + i + w)


@given(sizes, sizes)
def test_rank_holds_one_activation_for_each_stage_from_its_own_on(num_stages, m):
    held = tuple(min(num_stages - rank, m) for rank in range(num_stages))
    assert peak_activations(one_f_one_b(num_stages, m)) == held


@given(sizes, sizes)
def test_forward_follows_the_backward_of_the_micro_batch_a_warm_up_before(num_stages, m):
    for rank, order in enumerate(one_f_one_b(num_stages, m).orders):
        words = list(map(str, order))
        for n in range(num_stages - rank, m):
            earlier = words.index(f"B{rank}.{n - num_stages + rank}")
            assert words[earlier + 1] == f"F{rank}.{n}"


def test_one_micro_batch_is_gpipe():
    assert one_f_one_b(5, 1).orders == gpipe(5, 1).orders


def test_picture_in_the_docstring_is_what_runs():
    assert picture(one_f_one_b(3, 4)) in sys.modules[one_f_one_b.__module__].__doc__


def test_1024_ranks_with_4096_micro_batches_fit_in_600_mb():
    program = (
        "from penstock.schedule import one_f_one_b\n"
        "schedule = one_f_one_b(1024, 4096)\n"
        "assert schedule.orders.num_actions == 2 * 1024 * 4096\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(peak.split()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) * 1024 < 600e6
