"""The GPU worker: dense layers and experts, weights streamed from host memory."""
