// One template, several instantiations, each asked for by a name expression such as "saxpy<double>".
template <typename T>
__global__ void saxpy(T a, const T *x, T *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        y[i] = a * x[i] + y[i];
    }
}
