"""bench.layouts: published tables become runs; what is skipped, what is refused."""

from pathlib import Path

import pytest

from bench.layouts import read
from penstock.errors import EstimateError
from penstock.units import GiB

VTRAIN = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
MEGATRON = "source,params_B,heads,hidden,layers,tp,pp,dp,gpus,batch,tflops_gpu"
SIMUMAX = "case,model,parallel,layer_num,mbc,real_ms,perf_ms,real_alloc_gib,perf_alloc_gib"
SAILOR = (
    "set,model,gpus_by_stage,pp,tp,dp,mbs,gbs,layers_per_stage,real_iter_s,max_mem_bytes,"
    "red_grads_s,N_nodes"
)
MOSAIC = (
    "section,model,seq_len,gpus,gpu,mbs,grad_accum,gbs_tokens,tokens_s,precision,mp_mode,"
    "sharding,act_ckpt"
)
ROW = {  # invented
    VTRAIN: "8,32,2,1536,16,18,1024,2,2,2,300",
    MEGATRON: "invented,1,16,1536,18,2,1,4,8,64,100",
    SIMUMAX: "x_mbc8,llama3-70b,tp2pp2,8,8,900,880,50,49",
    SAILOR: "here,OPT-350,GH-96/GH-96,2,4,2,1,64,12/14,1.5,8000000000,0.01,4",
    MOSAIC: "x,1b,2048,16,a100_80gb,8,2,524288,100000,amp_bf16,DEFAULT,FULL_SHARD,True",
}


@pytest.fixture
def write(tmp_path: Path):
    def to_file(*lines: str) -> Path:
        path = tmp_path / "runs.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return to_file


def only(table):
    (sample,) = table.samples
    return sample


def test_vtrain(write):
    table = read(write(VTRAIN, ROW[VTRAIN]))
    sample = only(table)
    run = sample.run
    assert (table.layout, table.skipped) == ("vtrain", 0)
    assert (sample.seconds, sample.peak_bytes) == (0.3, None)
    assert (run.tensor, run.data, run.pipe, run.micro_batch, run.num_micro_batches) == (
        2,
        2,
        2,
        2,
        8,
    )
    assert (run.model.hidden, run.stage_blocks, run.recompute) == (1536, (9, 9), "full")


def test_megatron_seconds_are_by_its_formula(write):
    sample = only(read(write(MEGATRON, ROW[MEGATRON])))
    flop = 96 * 64 * 2048 * 18 * 1536**2 * (1 + 2048 / (6 * 1536) + 51200 / (16 * 18 * 1536))
    assert sample.seconds == pytest.approx(flop / (100e12 * 8))
    assert (sample.run.micro_batch, sample.run.num_micro_batches) == (4, 4)


def test_simumax_takes_degrees_length_and_recompute_from_words(write):
    sample = only(read(write(SIMUMAX, ROW[SIMUMAX])))
    assert (sample.seconds, sample.peak_bytes) == (0.9, 50 * GiB)
    assert (sample.run.tensor, sample.run.pipe, sample.run.data) == (2, 2, 2)
    long = "x_seq16384_full_recompute,llama3-70b,tp1cp4pp2,8,8,900,880,50,49"
    run = only(read(write(SIMUMAX, long))).run
    assert (run.context, run.model.sequence, run.recompute) == (4, 16384, "full")


def test_sailor_layers_include_embedding_and_head(write):
    sample = only(read(write(SAILOR, ROW[SAILOR])))
    assert sample.run.stage_blocks == (11, 13)
    assert sample.run.model.hidden == 1024
    assert (sample.run.ranks, sample.run.devices[0].ranks_per_host) == (16, 4)
    assert sample.run.on_device
    assert sample.peak_bytes == 8e9


def test_sailor_layers_say_which_model_ran(write):
    wrong = ROW[SAILOR].replace("OPT-350", "GPT-NEO")
    assert only(read(write(SAILOR, wrong))).run.model.hidden == 1024
    right = wrong.replace("12/14", "16/18")
    assert only(read(write(SAILOR, right))).run.model.hidden == 2560


def test_mosaic_seconds_are_those_of_a_batch(write):
    sample = only(read(write(MOSAIC, ROW[MOSAIC])))
    assert sample.seconds == 5.24288
    assert (sample.run.data, sample.run.sharding, sample.run.recompute) == (16, "full", "full")
    eight = ROW[MOSAIC].replace("amp_bf16", "amp_fp8")
    assert only(read(write(MOSAIC, eight))).run.product_speed == 2


@pytest.mark.parametrize("word", ["", "nan", "inf", "-inf", "OOM", "0", " NaN "])
@pytest.mark.parametrize(("head", "cell"), [(VTRAIN, "300"), (SAILOR, "1.5"), (SIMUMAX, "900")])
def test_runs_that_failed_are_skipped_and_counted(write, head, cell, word):
    failed = ROW[head].replace(f",{cell}", f",{word}")
    table = read(write(head, ROW[head], failed, "", failed))
    assert (len(table.samples), table.skipped) == (1, 2)


def test_memory_that_was_not_measured_is_left_out(write):
    assert only(read(write(SAILOR, ROW[SAILOR].replace("8000000000", "")))).peak_bytes is None


def test_order_of_columns_and_columns_more_do_not_matter(write):
    names, cells = VTRAIN.split(","), ROW[VTRAIN].split(",")
    head, row = ",".join(["more", *names[::-1]]), ",".join(["x", *cells[::-1]])
    assert read(write(head, row)).samples == read(write(VTRAIN, ROW[VTRAIN])).samples


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["a,b", "1,2"], "columns of no known layout"),
        ([VTRAIN], "has no row to use: 0 rows"),
        ([VTRAIN, ROW[VTRAIN].replace("300", "nan")], "no row to use: 1 rows"),
        ([VTRAIN, ROW[VTRAIN].replace("1536", "wide")], "row 2: hidden size is 'wide'"),
        ([VTRAIN, ROW[VTRAIN].replace("1536", "-5")], "row 2: hidden size is '-5'"),
        ([VTRAIN, ROW[VTRAIN].replace("1536", "1e300")], "not a positive number"),
        ([VTRAIN, ROW[VTRAIN].replace("1536", "1536.5")], "not a whole number"),
        ([VTRAIN, ROW[VTRAIN].replace("1536", "1e12")], "row 2: hidden size is 1e12"),
        ([VTRAIN, ROW[VTRAIN].replace("300", "soon")], "iteration time .ms. is 'soon'"),
        ([VTRAIN, ROW[VTRAIN].replace("300", "-3")], "'-3', not a possible number"),
        ([VTRAIN, ROW[VTRAIN].replace("300", "1e300")], "'1e300', not a possible number"),
        ([MOSAIC, ROW[MOSAIC].replace("524288", "1e-300")], "'1e-300', not a positive number"),
        ([VTRAIN, ROW[VTRAIN] + ",9"], "row 2: 12 cells for 11 columns"),
        ([VTRAIN, ROW[VTRAIN].replace("8,32", "9,32")], "row 2: degrees of 8 ranks on 9 GPUs"),
        ([VTRAIN, ROW[VTRAIN].replace("1536", "1537")], "row 2: hidden size 1537 is not"),
        ([SIMUMAX, ROW[SIMUMAX].replace("llama3-70b", "llama9")], "row 2: no model is called"),
        ([SIMUMAX, ROW[SIMUMAX].replace("tp2pp2", "tp2zz2")], "parallel is 'tp2zz2'"),
        ([SIMUMAX, ROW[SIMUMAX].replace("tp2pp2", "2tp")], "parallel is '2tp'"),
        ([SAILOR, ROW[SAILOR].replace("GH-96/", "GPU/")], "row 2: no device is called 'GPU'"),
        ([SAILOR, ROW[SAILOR].replace("GH-96,2,4", "GH-96,3,4")], "3 stages, and blocks of 2"),
        ([SAILOR, ROW[SAILOR].replace("2,1,64", "99,1,64")], "64 samples for 99 replicas"),
        ([MEGATRON, ROW[MEGATRON].replace("4,8,64", "4,999,64")], "8 ranks on 999 GPUs"),
        ([SAILOR, ROW[SAILOR].replace("12/14", "twelve")], "layers_per_stage is 'twelve'"),
        ([SAILOR, ROW[SAILOR].replace("12/14", "12/7/7")], "row 2: 2 devices for stages of"),
        ([MOSAIC, ROW[MOSAIC].replace("FULL_SHARD", "HALF")], "sharding is 'HALF'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_row(write, lines, message):
    with pytest.raises(EstimateError, match=message) as caught:
        read(write(*lines))
    assert caught.value.hint


def test_what_is_no_csv_is_refused(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(EstimateError, match="is not CSV"):
        read(path)
    with pytest.raises(EstimateError, match=r"cannot read .*missing"):
        read(tmp_path / "missing.csv")
    with pytest.raises(EstimateError, match="cannot read"):
        read(tmp_path)
