"""Top-level names in the include directories of CUDA toolkits.

What a toolkit provides must not depend on which toolkit, or whether one, is on this machine, so the names are written
down here. ``tests/test_toolkit.py`` compares them with the headers it finds.
"""

# ruff: noqa: SIM905 - a hundred quoted names would hide what changed between two toolkits
from __future__ import annotations

__all__ = ["BUNDLED_13_5", "INCLUDED", "TOOLKIT_NAMES", "WHEELS_12_9"]

BUNDLED_13_5 = frozenset(
    """
cooperative_groups cooperative_groups.h crt cuComplex.h cub cuda cuda_awbarrier.h cuda_awbarrier_helpers.h
cuda_awbarrier_primitives.h cuda_bf16.h cuda_fp16.h cuda_fp4.h cuda_fp4.hpp cuda_fp6.h cuda_fp6.hpp cuda_fp8.h
cuda_fp8.hpp cuda_pipeline.h cuda_pipeline_helpers.h cuda_pipeline_primitives.h cuda_tf32.h cudart_platform.h
math_constants.h mma.h nv thrust vector_types.h
""".split()
)
"""Of the headers that NVRTC 13.5 bundles: ``include`` and ``include/cccl``."""

WHEELS_12_9 = frozenset(
    """
builtin_types.h channel_descriptor.h common_functions.h cooperative_groups cooperative_groups.h cuComplex.h cub cuda
cuda.h cudaEGL.h cudaEGLTypedefs.h cudaGL.h cudaGLTypedefs.h cudaProfilerTypedefs.h cudaTypedefs.h cudaVDPAU.h
cudaVDPAUTypedefs.h cuda_awbarrier.h cuda_awbarrier_helpers.h cuda_awbarrier_primitives.h cuda_bf16.h cuda_bf16.hpp
cuda_device_runtime_api.h cuda_egl_interop.h cuda_fp16.h cuda_fp16.hpp cuda_fp4.h cuda_fp4.hpp cuda_fp6.h
cuda_fp6.hpp cuda_fp8.h cuda_fp8.hpp cuda_gl_interop.h cuda_occupancy.h cuda_pipeline.h cuda_pipeline_helpers.h
cuda_pipeline_primitives.h cuda_runtime.h cuda_runtime_api.h cuda_surface_types.h cuda_texture_types.h
cuda_vdpau_interop.h cudart_platform.h device_atomic_functions.h device_atomic_functions.hpp
device_double_functions.h device_functions.h device_launch_parameters.h device_types.h driver_functions.h
driver_types.h host_config.h host_defines.h library_types.h math_constants.h math_functions.h mma.h nv
sm_20_atomic_functions.h sm_20_atomic_functions.hpp sm_20_intrinsics.h sm_20_intrinsics.hpp sm_30_intrinsics.h
sm_30_intrinsics.hpp sm_32_atomic_functions.h sm_32_atomic_functions.hpp sm_32_intrinsics.h sm_32_intrinsics.hpp
sm_35_atomic_functions.h sm_35_intrinsics.h sm_60_atomic_functions.h sm_60_atomic_functions.hpp sm_61_intrinsics.h
sm_61_intrinsics.hpp surface_functions.h surface_indirect_functions.h surface_types.h texture_fetch_functions.h
texture_indirect_functions.h texture_types.h thrust vector_functions.h vector_functions.hpp vector_types.h
""".split()
)
"""Of the wheels nvidia-cuda-runtime-cu12 and nvidia-cuda-cccl-cu12 of 12.9."""

_OTHERS = frozenset(
    """
cuda_profiler_api.h cuda_stdint.h cuda_tile.h curand.h curand_kernel.h curand_mtgp32_kernel.h curand_philox4x32_x.h
nvrtc.h nvtx3
""".split()
)
"""Of other wheels and of system toolkits, as far as device code includes them."""

INCLUDED = frozenset(
    """
DbgHelp.h EGL/egl.h EGL/eglext.h GL/gl.h OpenGL/gl.h Windows.h __memory/addressof.h __pstl_algorithm
__utility/as_const.h __utility/forward.h __utility/forward_like.h __utility/move.h algorithm array assert.h atomic
bits/move.h cassert cfloat chrono ciso646 cmath compare complex cstddef cstdint cstdio cstdlib cstring cudaProfiler.h
cxxabi.h debug/safe_iterator.h dispatch/dispatch.h dlfcn.h dlpack.h dlpack/dlpack.h endian.h errno.h exception
expected experimental/memory_resource float.h format function functional initializer_list intrin.h iosfwd iostream
iterator limits limits.h linux/futex.h map math.h memory memory_resource mutex new numeric nvrtc_device_runtime.h
omp.h optional ostream process.h pthread.h sched.h semaphore.h set sstream stddef.h stdexcept stdint.h stdio.h
stdlib.h string string.h string_view sys/syscall.h system_error target tbb/blocked_range.h tbb/parallel_for.h
tbb/parallel_invoke.h tbb/parallel_reduce.h tbb/parallel_scan.h thread time.h tuple type_traits typeinfo unistd.h
unordered_map utility variant vdpau/vdpau.h vector version winapifamily.h windows.h xutility yvals.h
""".split()
)
"""What those headers include and toolkits do not hold; a user's file of that name is read by them, unseen."""

TOOLKIT_NAMES = BUNDLED_13_5 | WHEELS_12_9 | _OTHERS
