"""What a machine with GPUs shows of Paceline: `scripts/gpu-check`, explained in docs/gpu.md."""
