"""The C extensions (cffi API mode); everything else is declared in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "native/build.py:attention_builder",
        "native/build.py:channel_builder",
        "native/build.py:gemm_builder",
    ]
)
