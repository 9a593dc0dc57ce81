"""Configuration: the model's shape, the engine's settings, rank arithmetic (no torch)."""

from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_engine_config, load_model_config, resolve_model
from deepinfer.config.mesh import Mesh
from deepinfer.config.model import LayerConfig, ModelConfig, VisionConfig, YarnConfig

__all__ = [
    "EngineConfig",
    "LayerConfig",
    "Mesh",
    "ModelConfig",
    "VisionConfig",
    "YarnConfig",
    "load_engine_config",
    "load_model_config",
    "resolve_model",
]
