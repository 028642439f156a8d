"""The models, machines and workloads that the planner knows by name."""

from planner.catalogue.files import read_table
from planner.catalogue.machines import gpu_names, hardware, hardware_names, host_names
from planner.catalogue.models import model, model_names, read_model_config

__all__ = [
    "gpu_names",
    "hardware",
    "hardware_names",
    "host_names",
    "model",
    "model_names",
    "read_model_config",
    "read_table",
]
