"""Host time of a step on GPUs, measured on the device that pretends to be CUDA."""
