"""Communication over nodes, counted: which way its numbers move, and what holds it to account."""

import dataclasses

import pytest

from fp8study.analysis import scale
from fp8study.analysis.laws.cells import cells_of, read_runs
from fp8study.analysis.laws.communication import (
    NETWORK,
    Network,
    communication_ms,
    exposed_ms,
    num_nodes_for,
    received,
    traffic,
)
from fp8study.analysis.laws.nearby import as_fp8
from fp8study.analysis.laws.shape import shape_of
from fp8study.analysis.laws.speed import predicted_step
from fp8study.analysis.scale import facts_of, run_at_scale
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.hardware import named_gpu
from tests.checkout import ROOT

SHAPE = shape_of("llama-3.1-8b")
LINK = 264.0
SLOW = Network(gb_per_s=4.0)


def spread(num_gpus, **values):
    return run_at_scale("llama-3.1-8b", num_gpus, **values)


@pytest.fixture(scope="module")
def cells():
    return cells_of(read_runs(ROOT / "results"))


def test_fp8_all_gather_halves_what_is_gathered_of_layers():
    bf16 = spread(64)
    plain, half = (traffic(config, SHAPE) for config in (bf16, as_fp8(bf16, "fp8_tensorwise")))
    layers = (1 - 1 / 64) * 2 * SHAPE.num_layers * SHAPE.layer_parameters
    assert plain.forward - half.forward == pytest.approx(layers / 2)
    assert plain.backward - half.backward == pytest.approx(layers / 2)
    assert traffic(as_fp8(bf16, "fp8_tensorwise", False), SHAPE) == plain


def test_a_gpu_receives_whole_tensors_less_its_share():
    weights, root = SHAPE.num_layers * SHAPE.layer_parameters, SHAPE.root_parameters
    moved = traffic(spread(8), SHAPE)
    by_hand = 7 / 8 * (2 * 2 * (weights + root) + 4 * SHAPE.num_parameters)
    assert (moved.total, moved.between) == (pytest.approx(by_hand), 0.0)
    full, hybrid = (traffic(spread(64, sharding=s), SHAPE) for s in ("full", "hybrid"))
    assert full.between == pytest.approx(full.total / 8)  # each of a node's links brings a part
    assert hybrid.forward == moved.forward
    assert hybrid.between == pytest.approx(7 / 8 * 8 * SHAPE.num_parameters / 8)


def test_gradients_travel_after_each_pass_that_reduces_them():
    ways = [spread(64, gradient_accumulation_steps=4, gradient_reduction=way)
            for way in ("last_pass", "each_pass")]  # fmt: skip
    (last, between), (each, _) = (received(config, SHAPE) for config in ways)
    gradients = 63 / 64 * 4 * SHAPE.num_parameters
    assert each - last == pytest.approx(3 * gradients)
    assert each == pytest.approx(4 * traffic(ways[0], SHAPE).total)
    assert between == pytest.approx(last / 8)
    once, *waits = (exposed_ms(config, SHAPE, 50.0, LINK) for config in (spread(64), *ways))
    assert once < waits[0] < waits[1] == pytest.approx(4 * once)


def test_ddp_adds_whole_gradients_up_in_two_rounds():
    config = spread(16, strategy="ddp", reshard_after_forward=None)
    assert traffic(config, SHAPE).total == pytest.approx(15 / 16 * 8 * SHAPE.num_parameters)
    forward, backward = communication_ms(config, SHAPE, LINK)
    assert forward == 0 < backward


def test_more_nodes_take_longer_and_expose_more():
    runs = [spread(8 * 2**n) for n in range(8)]
    times = [sum(communication_ms(config, SHAPE, LINK)) for config in runs]
    assert times == sorted(set(times))
    waits = [exposed_ms(config, SHAPE, 300.0, LINK) for config in runs]
    assert waits == sorted(waits) and waits[-1] > waits[0]


def test_a_slower_network_lowers_efficiency_and_none_matters_within_a_node():
    networks = [Network(rate) for rate in (4.0, 10.0, 40.0)]
    laws = [predicted_step(spread(64), SHAPE, network=network) for network in networks]
    rates = [1 / law.total for law in laws]
    assert rates == sorted(set(rates))
    waits = [law.communication / law.total for law in laws]
    assert waits[0] > 0.5 > waits[-1]
    assert predicted_step(spread(8), SHAPE, network=SLOW) == predicted_step(spread(8), SHAPE)


@pytest.mark.parametrize("num_gpus", [4, 64])
def test_trays_of_four_that_nvlink_joins_are_as_one_node(num_gpus: int) -> None:
    gb200 = NETWORK.of(named_gpu("gb200"))
    config = spread(num_gpus, num_nodes=num_gpus // gb200.gpus_per_node)
    assert gb200.num_parts(config) == 1
    whole = dataclasses.replace(config, num_nodes=1)
    assert communication_ms(config, SHAPE, LINK, gb200) == communication_ms(whole, SHAPE, LINK)
    beyond = spread(128, num_nodes=32)
    assert gb200.num_parts(beyond) == 2
    assert gb200.rate_of_ring(beyond) == 72 * NETWORK.gb_per_s


def test_nodes_of_four_bring_half_of_what_nodes_of_eight_do() -> None:
    eight, four = (spread(64, num_nodes=number) for number in (8, 16))
    assert [NETWORK.rate_of_ring(each) for each in (eight, four)] == [320.0, 160.0]
    times = [sum(communication_ms(each, SHAPE, LINK)) for each in (eight, four)]
    assert times[0] < times[1]


def test_fp8_leads_by_more_where_its_all_gather_saves_time_that_shows():
    bf16 = spread(64)
    runs = (bf16, *(as_fp8(bf16, "fp8_tensorwise", gathers) for gathers in (False, True)))
    plain, without, gathered = (predicted_step(run, SHAPE, network=SLOW) for run in runs)
    assert gathered.communication < 0.8 * without.communication
    assert gathered.total < plain.total


def test_hybrid_sharding_helps_where_hops_do_not_hide():
    full, hybrid = (facts_of(spread(1024, sharding=s), SHAPE) for s in ("full", "hybrid"))
    assert hybrid["exposed_pct"] < full["exposed_pct"]
    assert hybrid["efficiency_pct"] > full["efficiency_pct"]


def test_recomputed_layers_hide_more_in_the_backward_pass():
    config = spread(64, activation_checkpointing=True)
    plain = dataclasses.replace(config, activation_checkpointing=False)
    forward, backward = communication_ms(config, SHAPE, LINK)
    busy = forward + backward  # as long as all that is moved, but the shares differ
    assert exposed_ms(config, SHAPE, busy, LINK) != exposed_ms(plain, SHAPE, busy, LINK)
    assert exposed_ms(config, SHAPE, 0.0, LINK) == pytest.approx(busy)


@pytest.mark.parametrize("number", [12, 100, 1001])
def test_a_node_that_is_half_empty_is_refused_in_one_line(number):
    with pytest.raises(UserError, match=rf"^--num-gpus: {number} does not fill .* try") as caught:
        num_nodes_for(number)
    assert "\n" not in str(caught.value)
    assert [num_nodes_for(n) for n in (1, 3, 8, 16, 1024)] == [1, 1, 1, 2, 128]
    assert [num_nodes_for(n, 4) for n in (1, 3, 8, 12)] == [1, 1, 2, 3]


def test_the_two_answers_at_scale(cells):
    table = scale.scale_table(cells)
    assert [(m, n) for m, n in table[["model", "num_gpus"]].drop_duplicates().to_numpy()] == [
        *scale.ASKED
    ]
    is_bf16 = table["precision"] == "bf16"
    assert table["lead_pct"].isna().equals(is_bf16)
    recomputed = table["activation_checkpointing"]
    fits = table["fits"].groupby([table["model"], recomputed]).all()
    assert fits["llama-3.1-405b", True] and not fits["llama-3.1-405b", False]
    # Leads are of rows of one table.
    for _, group in table.groupby(["model", recomputed]):
        rates = group["tokens_per_second_per_gpu"]
        leads = 100 * (rates / rates.iloc[0] - 1)
        assert leads.tolist()[1:] == pytest.approx(group["lead_pct"].tolist()[1:])
    assert (table["within_points"].dropna() > 5).all()
    assert scale.scale_table([]).empty


def test_the_law_is_held_to_what_was_measured(cells):
    table = scale.check_table(cells).set_index(["num_gpus", "model"])
    assert {1, 2, 4} <= {*table.index.get_level_values("num_gpus")}
    profiled = table[table["num_profiled"] > 0]
    assert (profiled["bytes_error_pct"] < 10).all()
    assert table["step_error_pct"].between(0, 30).all()
    assert scale.check_table([]).empty


def test_the_law_over_slow_links_gets_their_rate_alone(cells):
    table = scale.links_table(cells).set_index(["model", "path"])
    assert table["link_gb_per_s"].between(20, 30).all()  # NVLink: 248
    of_8b = table.loc["llama-3.1-8b"]
    assert {*of_8b.index} == {"plain", "tuned"}
    errors = of_8b[["bf16_error_pct", "fp8_error_pct"]]
    assert errors.abs().max(axis=None) < 6
    assert (of_8b["predicted_pct"] - of_8b["measured_pct"]).abs().max() < 6
    linked = [cell for cell in cells if cell.config.gpu_links != "unused"]
    assert scale.links_table(linked).empty
    assert scale.check_table(cells).equals(scale.check_table(linked))


def test_the_law_is_within_a_few_points_of_what_others_report_of_more_nodes():
    table = scale.published_table()
    assert (table["predicted_pct"] - table["published_pct"]).abs().max() < 5


@pytest.mark.parametrize(
    "asked",
    [{"update_kernel": "one_pass", "gradient_dtype": "compute", "max_grad_norm": 1},
     {"precision": "fp8_tensorwise", "weight_cast": "each_update", "transposes": "separate"}],
)  # fmt: skip
def test_switches_of_one_precision_are_decided_anew_in_another(asked):
    config = make_config({"path": "tuned", "strategy": "none"} | asked).resolved()
    found = as_fp8(config, "fp8_rowwise")
    switches = (found.weight_cast, found.gradient_dtype, found.transposes)
    assert switches == ("each_pass", "master", "fused")
