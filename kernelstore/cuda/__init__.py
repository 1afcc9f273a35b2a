"""The CUDA boundary: thin, checked calls to the driver, NVRTC and the toolkit's files."""
