"""How a job is parallel, from what its ranks were started with: environment variables and command-line arguments.

Megatron-LM, NeMo (Hydra overrides) and torchtitan name the sizes as arguments; any launcher may export ``TRAINWARDEN_TP``, ``_CP``,
``_EP``, ``_DP``, ``_PP``, ``_ORDER`` or ``_COORDINATES``, which win. The names of axes are those of `trainwarden.parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainwarden.parallel import AXES, DEFAULT_ORDER, KEYS, parallel_layout

ARGUMENTS = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "tensor_parallel_degree": "tp", "pipeline_parallel_degree": "pp", "context_parallel_degree": "cp", "expert_parallel_degree": "ep",
    "data_parallel_shard_degree": "dp", "data_parallel_replicate_degree": "dp_replicate",
}  # fmt: skip
SHORT = {"tp": "tp", "pp": "pp"}
"""Hugging Face's and vLLM's short options; only with two dashes."""
PIPELINE_FIRST = "use_tp_pp_dp_mapping"
PIPELINE_FIRST_ORDER = "tp-cp-ep-pp-dp"
ENVIRONMENT = {
    **{f"TRAINWARDEN_{key.upper()}": key for key in KEYS},
}
EXPORTED = {name.upper(): axis for name, axis in ARGUMENTS.items() if axis in AXES}
"""Launch scripts export the sizes under the arguments' own names."""
MAX_DIGITS = 7


def variables_wanted() -> frozenset[str]:
    """The environment variables that matter here; nothing else of a process's environment is kept."""
    return frozenset({*ENVIRONMENT, *EXPORTED})


def parallel_attributes(environment: Mapping[str, str], argv: Sequence[str], world: int) -> dict[str, str]:
    """Attributes for the job's topology event; empty when nothing is said, or what is said does not fit `world` ranks.

    Examples
    --------
    >>> parallel_attributes({}, ["train.py", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"], 8)
    {'tp': '2', 'dp': '2', 'pp': '2', 'order': 'tp-cp-ep-dp-pp'}
    """
    own = {key: environment[name].strip() for name, key in ENVIRONMENT.items() if environment.get(name, "").strip()}
    if "coordinates" in own:
        return _fitting({"coordinates": own["coordinates"]}, world)
    said = {**_exported(environment), **_sizes(argv), **own}
    if not any(key in said for key in AXES):
        return {}
    return _fitting(_completed(said, world), world)


def _exported(environment: Mapping[str, str]) -> dict[str, str]:
    return {axis: environment[name] for name, axis in EXPORTED.items() if _is_size(environment.get(name, ""))}


def _sizes(argv: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        key = name.lstrip("-+").rpartition(".")[2].replace("-", "_")
        if key == PIPELINE_FIRST and value.lower() not in ("false", "0"):
            found["order"] = PIPELINE_FIRST_ORDER
        axis = ARGUMENTS.get(key) or (SHORT.get(key) if name.startswith("--") else None)
        text = value if equals else argv[i + 1] if name.startswith("-") and i + 1 < len(argv) else ""
        if axis and _is_size(text):
            found[axis] = text
    return _joined(found)


def _joined(found: dict[str, str]) -> dict[str, str]:
    """torchtitan splits data parallelism in replicas and shards: together they are one axis."""
    replicas = found.pop("dp_replicate", "1")
    if replicas != "1" and "dp" in found:
        found["dp"] = str(int(found["dp"]) * int(replicas))
    return found


def _completed(said: Mapping[str, str], world: int) -> dict[str, str]:
    """`said` with the data-parallel size that the others leave of `world`: nobody passes it on the command line.

    Experts of Megatron and torchtitan share the data-parallel axis, so they take no part in the division.
    """
    sizes = {axis: said[axis] for axis in AXES if axis in said}
    others = math.prod(int(sizes[axis]) for axis in ("tp", "cp", "pp") if _is_size(sizes.get(axis, "")))
    if "dp" not in sizes and others and world % others == 0:
        sizes["dp"] = str(world // others)
    ordered = {axis: sizes[axis] for axis in AXES if axis in sizes}
    return {**ordered, "order": said.get("order", DEFAULT_ORDER)}


def _fitting(attributes: dict[str, str], world: int) -> dict[str, str]:
    return attributes if parallel_layout(attributes, world) is not None else {}


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS and int(text) > 0
