// A polynomial of complex numbers by Horner's rule, with the standard library of libcu++.
#include <cuda/std/array>
#include <cuda/std/complex>
#include <cuda/std/span>

using Complex = cuda::std::complex<float>;

__device__ Complex evaluate(Complex z) {
    constexpr cuda::std::array<float, 5> coefficients{0.5f, -1.0f, 0.25f, 2.0f, -0.125f};
    Complex value{};
    for (float coefficient : coefficients) {
        value = value * z + coefficient;
    }
    return value;
}

extern "C" __global__ void polynomial(const Complex *in, Complex *out, int n) {
    const cuda::std::span<const Complex> points(in, n);
    const cuda::std::span<Complex> values(out, n);
    const auto i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < points.size()) {
        values[i] = evaluate(points[i]);
    }
}
