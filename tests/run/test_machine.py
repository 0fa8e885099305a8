import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8study import __version__
from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.run.machine import (
    Gpu,
    Machine,
    boot_hash,
    git_state,
    gpu_link,
    host_hash,
    machine_facts,
    memory_gib,
    this_machine,
    versions,
)
from fp8study.run.processes import training_environment
from tests.checkout import ROOT, run_python

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "FP8STUDY_SOMETHING")


def gpu(name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(0, "GPU-0", name, 139.8, capability, 700.0, 1980, 3201)


A100, H200 = gpu("NVIDIA A100-SXM4-80GB", (8, 0)), gpu()


def fp8(**changes: Any) -> RunConfig:
    return make_config({"precision": "fp8"} | changes)


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"])
@pytest.mark.parametrize("emulate", [None, False])
def test_fp8_is_refused_on_a_gpu_without_it(precision: str, emulate: bool | None) -> None:
    config = fp8(precision=precision, fp8_emulate=emulate, strategy="fsdp2")
    with pytest.raises(UserError, match=rf"^precision: '{precision}'") as caught:
        Machine((A100,), 8).check(config)
    for word in ("8.9", "NVIDIA A100-SXM4-80GB has 8.0", "precision=bf16", "fp8_emulate=true"):
        assert word in str(caught.value)


def test_weakest_gpu_decides() -> None:
    with pytest.raises(UserError, match="A100"):
        Machine((H200, A100), 8).check(fp8())


@pytest.mark.parametrize(
    ("gpus", "config"),
    [
        ((A100,), fp8(fp8_emulate=True)),
        ((A100,), RunConfig()),
        ((gpu("NVIDIA L40S", (8, 9)),), fp8()),
        ((gpu("NVIDIA B200", (10, 0)),), fp8()),
        ((H200, H200), fp8(num_gpus=2)),
        ((), fp8(num_gpus=4)),
    ],
)
def test_possible_runs_are_let_through(gpus: tuple[Gpu, ...], config: RunConfig) -> None:
    Machine(gpus, num_cpus=4).check(config)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((H200, H200), "3 is more than the 2 visible GPUs; .*CUDA_VISIBLE_DEVICES"),
        ((), "3 is more than the 2 CPU cores .*; lower it"),
    ],
)
def test_more_processes_than_the_machine_has_places_are_refused(
    gpus: tuple[Gpu, ...], words: str
) -> None:
    with pytest.raises(UserError, match=rf"^num_gpus: {words}"):
        Machine(gpus, num_cpus=2).check(RunConfig(num_gpus=3))


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [((), None, True), ((H200,), None, False), ((H200,), True, True), ((), False, False)],
)
def test_fp8_is_emulated_where_there_is_no_gpu_or_on_demand(
    gpus: tuple[Gpu, ...], asked: bool | None, expected: bool
) -> None:
    resolved = fp8(fp8_emulate=asked).resolved(on_gpu=bool(gpus))
    assert resolved.fp8_emulate is expected


def test_flash_attention_4_is_refused_on_gpus_it_was_not_made_for() -> None:
    config = make_config({"attention": "flash4"})
    with pytest.raises(UserError, match=r"^attention: 'flash4' .*A100.* has 8.0; use cudnn"):
        Machine((H200, A100), 8).check(config)
    for gpus in ((), (H200,)):
        Machine(gpus, 8).check(config)


def test_a_cpu_does_not_do_without_emulation() -> None:
    with pytest.raises(UserError, match=r"^fp8_emulate: false is for GPUs"):
        Machine((), 2).check(fp8(fp8_emulate=False))
    Machine((), 2).check(RunConfig(fp8_emulate=False))  # BF16 has nothing to emulate


def test_this_machine_is_described() -> None:
    machine = this_machine()
    facts = machine_facts(machine)
    assert facts["device"] == machine.device in ("cpu", "cuda")
    assert facts["num_cpus"] == machine.num_cpus >= 1
    assert facts["memory_gib"] > 0


@pytest.mark.parametrize(
    ("group", "limits", "gib"),
    [
        ("0::/", {"memory.max": "2147483648\n"}, 2),
        ("0::/a/b", {"memory.max": "3221225472\n", "a/b/memory.max": "max\n"}, 3),
        ("0::/a/b", {"a/memory.max": "3221225472\n", "a/b/memory.max": "1073741824\n"}, 1),
        ("5:cpu:/\n4:memory:/out", {"memory/memory.limit_in_bytes": "1073741824\n"}, 1),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("4:cpu,memory:/a", {"cpu,memory/a/memory.limit_in_bytes": "1073741824\n"}, 1),
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/", {"memory.max": ""}, None),
        ("0::/", {"memory.max": "0\n"}, None),
        ("0::/", {}, None),
    ],
)
def test_memory_is_what_the_control_group_leaves_of_the_hosts(
    group: str, limits: dict[str, str], gib: float | None, tmp_path: Path
) -> None:
    host = memory_gib(tmp_path)  # nothing is said of limits there
    files = {"proc/self/cgroup": group} | {f"sys/fs/cgroup/{n}": x for n, x in limits.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_gib(tmp_path) == (gib or host)
    assert host == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def test_facts_name_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "570.1"
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    first = dataclasses.replace(A100, index=3, uuid="GPU-3", name="other")
    facts = machine_facts(Machine((A100, first), 8), used=[A100.index])
    assert facts["gpus"] == [{"index": A100.index, "uuid": A100.uuid, "name": A100.name}]
    assert (facts["device"], facts["gpu_name"]) == ("cuda", "NVIDIA A100-SXM4-80GB")
    assert (facts["num_gpus_on_machine"], facts["compute_capability"]) == (2, "8.0")
    assert (facts["driver"], facts["gpu_link"]) == ("570.1", None)


@pytest.mark.parametrize("header", [r"\t\033[4mGPU0\tGPU1\tCPU Affinity\033[0m", r"\tGPU0\tGPU1"])
@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (r"GPU0\tX\tNV18\t0-15\nGPU1\tNV18\tX\t0-15", "NV18"),
        (r"GPU0\tX\tPIX\tSYS\nGPU1\tPIX\tX\tSYS\nGPU2\tSYS\tSYS\tX\nNIC0\tNODE\tPHB", "SYS"),
        (r"GPU0\tX\t0-15", None),
    ],
)
def test_slowest_link_between_gpus_is_named(
    header: str, matrix: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{header}\\n{matrix}\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_link() == expected
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert gpu_link() == (expected and "SHM")


def test_provenance_holds_no_value_of_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"hush-{name}")
    told = json.dumps([machine_facts(this_machine()), versions(), git_state(Path(__file__).parent)])
    assert "hush-" not in told
    assert not any(name in told for name in SECRETS)


def test_versions_cover_what_shapes_a_result() -> None:
    found = versions()
    assert found["fp8study"] == __version__
    assert {"python", "torch", "torchao", "accelerate", "transformers"} <= set(found)
    assert all(found[name] for name in ("python", "torch", "torchao", "numpy"))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_uncommitted_changes_are_known(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "One")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("results do not count")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_exported_checkout_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("FP8STUDY_COMMIT", raising=False)
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    monkeypatch.setenv("FP8STUDY_COMMIT", "ab" * 20)
    assert git_state(tmp_path) == {"commit": "ab" * 20, "dirty": False}
    monkeypatch.setenv("FP8STUDY_COMMIT", "ab" * 20 + "-dirty")
    assert git_state(tmp_path) == {"commit": "ab" * 20, "dirty": True}


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},  # torch reads this one first
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
    ],
)
def test_the_chosen_allocator_reaches_the_training_processes(
    before: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    chosen = make_config({"allocator": "expandable"})

    def found(config: RunConfig, machine: Machine) -> dict[str, str]:
        return {n: v for n, v in training_environment(config, machine).items() if n in names}

    assert found(chosen, Machine((H200,), 8)) == expected
    assert found(make_config({}), Machine((H200,), 8)) == before
    assert found(chosen, Machine((), 2)) == before


def test_what_collectives_are_told_reaches_the_training_processes_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)

    def told(gpus: tuple[Gpu, ...] = (H200, H200), **values: Any) -> str | None:
        config = make_config({"num_gpus": 2} | values).resolved()
        return training_environment(config, Machine(gpus, 8)).get(name)

    assert told() is None
    assert told(collectives="copy_engines") == "1"
    assert told((), collectives="copy_engines") is None


def test_links_that_are_left_alone_are_told_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for values, said in (({}, None), ({"gpu_links": "unused"}, "1")):
        config = make_config({"num_gpus": 2, "path": "tuned"} | values).resolved()
        environment = training_environment(config, Machine((H200, H200), 8))
        assert environment.get("NCCL_P2P_DISABLE") == said
        assert (config.collectives == "nccl") == (said == "1")


def test_what_another_launcher_left_behind_reaches_no_training_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = {
        "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "GROUP_RANK": "1", "MASTER_PORT": "1",
        "MASTER_ADDR": "10.0.0.1", "PET_NNODES": "2", "PMI_SIZE": "8", "ACCELERATE_USE_FSDP": "1",
        "OMPI_COMM_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "3",
    }  # fmt: skip
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    several = RunConfig(num_gpus=2).resolved()
    plain = training_environment(RunConfig().resolved(), Machine((), 2))
    assert left.keys() & plain.keys() == {"SLURM_PROCID"}
    assert left.keys() & training_environment(several, Machine((), 2)).keys() == {"SLURM_PROCID"}
    one = training_environment(RunConfig(strategy="fsdp2").resolved(), Machine((), 2))
    assert (one["RANK"], one["WORLD_SIZE"], one["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    on_two = RunConfig(num_gpus=2, num_nodes=2).resolved()  # whose nodes set their own
    assert not left.keys() & training_environment(on_two, Machine((), 2)).keys()


def test_nodes_are_counted_and_their_gpus_too() -> None:
    two_nodes = RunConfig(num_gpus=4, num_nodes=2)
    with pytest.raises(UserError, match=r"num_nodes: 2 is more than the 1 at hand; .*clusters.md"):
        Machine((H200, H200), 8).check(two_nodes)
    Machine((H200, H200), 8, num_nodes=2).check(two_nodes)
    with pytest.raises(UserError, match="is more than the 1 at hand; lower it, or raise max_nodes"):
        Machine((H200, H200), 8, 1, "raise max_nodes").check(two_nodes)
    with pytest.raises(UserError, match=r"num_gpus: 4 on 2 nodes is more than the 1 visible"):
        Machine((H200,), 8, num_nodes=2).check(two_nodes)


def test_processes_of_one_host_give_it_one_hash() -> None:
    code = "from fp8study.run.machine import host_hash; print(host_hash())"
    seen = {run_python(ROOT, "-c", code).stdout.strip() for _ in range(2)}
    assert seen == {host_hash()}
    assert platform.node() not in host_hash()


def test_a_boot_is_told_without_its_id(tmp_path: Path) -> None:
    file = tmp_path / "boot_id"
    assert boot_hash(file) is None
    file.write_text("badb0dfd-cf07-41ba-871e-e1409b909a1e\n", encoding="ascii")
    first = boot_hash(file)
    assert first is not None and re.fullmatch("[0-9a-f]{12}", first)
    file.write_text("1adb0dfd-cf07-41ba-871e-e1409b909a1e\n", encoding="ascii")
    assert boot_hash(file) != first
