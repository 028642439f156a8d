"""The catalogue: complete, schema-checked, and right where a published number exists."""

import pytest

from planner import catalogue
from planner.errors import InvalidInputError, NotFoundError
from planner.hardware import PROVENANCES

NAMED_MODELS = {
    "mixtral-8x7b",
    "mixtral-8x22b",
    "dbrx",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "glm-4.5-air",
    "deepseek-v3",
    "olmoe-1b-7b",
}
NAMED_GPUS = [
    "t4",
    "l4",
    "a10g",
    "a40",
    "l40s",
    "rtx3090",
    "rtx4090",
    "rtx5090",
    "a100",
    "h100",
    "h200",
]
# Parameters as their makers publish them, in units of 10^9 (total, active).
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "dbrx": (132, 36),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-20b": (20.9, None),  # 3.6 published, which leaves the embedding out
    "gpt-oss-120b": (116.8, None),
    "glm-4.5-air": (106, None),
    "deepseek-v3": (671, 37),
    "olmoe-1b-7b": (6.9, 1.3),
}


def test_every_named_model_is_there():
    assert set(catalogue.model_names()) >= NAMED_MODELS


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_counts_agree_with_published_ones(name):
    total, active = PUBLISHED[name]
    spec = catalogue.model(name)
    assert spec.total_parameters / 1e9 == pytest.approx(total, rel=0.01)
    if active is not None:
        assert spec.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


def test_gpt_oss_checkpoint_size_matches_the_published_files():
    # 12.8 GiB of safetensors for gpt-oss-20b, 60.8 GiB for gpt-oss-120b (model card).
    assert catalogue.model("gpt-oss-20b").weights_bytes / 2**30 == pytest.approx(12.8, rel=0.01)
    assert catalogue.model("gpt-oss-120b").weights_bytes / 2**30 == pytest.approx(60.8, rel=0.01)


def test_kv_of_mixtral_is_534k_tokens_in_70_gb():
    assert catalogue.model("mixtral-8x7b").kv_capacity_tokens(70e9) == pytest.approx(
        534e3, rel=1e-3
    )


@pytest.mark.parametrize("name", NAMED_GPUS)
def test_every_named_gpu_makes_a_machine(name):
    spec = catalogue.hardware(name)
    known = [q for q in spec.quantities().values() if q is not None]
    assert len(known) == 12  # all but what only a measurement can tell
    assert all(q.provenance in PROVENANCES and q.source for q in known)


@pytest.mark.parametrize("name", catalogue.hardware_names())
def test_every_machine_builds_and_survives_json(name):
    spec = catalogue.hardware(name)
    assert type(spec).from_json(spec.to_json()) == spec


@pytest.mark.parametrize("text", ["4090", "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090"])
def test_gpus_are_found_as_people_write_them(text):
    assert catalogue.hardware(text).gpu == "rtx4090"


def test_gpu_and_host_can_be_joined():
    spec = catalogue.hardware("rtx4090+threadripper-pro")
    assert (spec.gpu, spec.host) == ("rtx4090", "threadripper-pro")


def test_the_slower_pcie_generation_counts():
    in_pcie5 = catalogue.hardware("rtx4090+desktop-ddr5").require("link_h2d_bytes_per_s")
    in_pcie3 = catalogue.hardware("rtx4090+gcp-n1").require("link_h2d_bytes_per_s")
    assert in_pcie5 == pytest.approx(25.2e9, rel=0.01)
    assert in_pcie3 == pytest.approx(12.6e9, rel=0.01)


def test_the_papers_testbed_has_the_papers_numbers():
    spec = catalogue.hardware("a40-xeon8380")
    assert spec.require("link_h2d_bytes_per_s") == 19.5e9
    assert spec.require("host_read_bytes_per_s") == 150e9
    assert spec.require("gpu_memory_bytes") == 16e9
    assert spec.link_h2d_bytes_per_s.provenance == "measured"


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (catalogue.model, "mixtral-8x7", "mixtral-8x7b"),
        (catalogue.hardware, "a40-xeon838", "a40-xeon8380"),
        (catalogue.hardware, "rtx4080", "rtx4090"),
        (catalogue.hardware, "rtx4090+desktop-dd5", "desktop-ddr5"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(call, wrong, right):
    with pytest.raises(NotFoundError, match=right):
        call(wrong)


def test_a_file_of_another_schema_is_refused(monkeypatch):
    from planner.catalogue import files

    monkeypatch.setattr(files.json, "loads", lambda text: {"schema": "other/1", "models": {}})
    files.read_table.cache_clear()
    with pytest.raises(InvalidInputError, match="moe-lens/models/1"):
        files.read_table("models")
    files.read_table.cache_clear()
