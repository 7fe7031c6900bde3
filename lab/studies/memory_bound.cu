// Plain memory-bound kernels of a DeepSeek-V3 layer, our own, as a yardstick for what straightforward code
// reaches of the HBM bandwidth. bf16 rows, 16-byte accesses, float arithmetic; H and I are multiples of 128.
// Built with: nvcc -cubin -arch=sm_90 -o memory_bound.cubin memory_bound.cu
// Each kernel states the bytes it must move for rows x columns elements; operators.py counts the same.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

typedef __nv_bfloat16 bf16;

struct alignas(16) Vec8 {
  bf16 x[8];
};

__device__ __forceinline__ void unpack(const Vec8& v, float* f) {
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = __bfloat162float(v.x[i]);
}

__device__ __forceinline__ Vec8 pack(const float* f) {
  Vec8 v;
#pragma unroll
  for (int i = 0; i < 8; ++i) v.x[i] = __float2bfloat16(f[i]);
  return v;
}

__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[32];
  for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = blockDim.x / 32;
  value = threadIdx.x % 32 < warps ? partial[threadIdx.x % 32] : 0.0f;
  for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
  __syncthreads();
  return value;
}

// bf16 -> fp8 e4m3 with one float scale per 1 x 128 group; 16 threads a group, 4 groups a thread.
// Bytes: 2 + 1 + 4/128 an element. Grid: vectors / (4 * blockDim).
extern "C" __global__ void cast_1x128(const Vec8* x, uint2* y, float* scale, long vectors) {
  const long first = (long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
  Vec8 v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (first + j * blockDim.x < vectors) v[j] = x[first + j * blockDim.x];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const long at = first + j * blockDim.x;
    float f[8], top = 1e-4f;
    unpack(v[j], f);
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(f[i]));
    for (int o = 8; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float up = 448.0f / top;
    uint2 out;
    unsigned short* half = reinterpret_cast<unsigned short*>(&out);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      half[i] = __nv_cvt_float2_to_fp8x2(make_float2(f[2 * i] * up, f[2 * i + 1] * up), __NV_SATFINITE, __NV_E4M3);
    if (at < vectors) {
      y[at] = out;
      if (at % 16 == 0) scale[at / 16] = top / 448.0f;
    }
  }
}

constexpr int kVectors = 7;  // vectors a thread of a norm row: 7 x 8 x 128 threads = 7168 columns

// y = x / rms(x) * weight, and 1 / rms a row. One CTA of 128 threads a row. Bytes: 4 an element.
extern "C" __global__ void rmsnorm_forward(const Vec8* x, const Vec8* weight, Vec8* y, float* inverse) {
  const long first = (long)blockIdx.x * blockDim.x * kVectors + threadIdx.x;
  Vec8 v[kVectors];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) v[j] = x[first + j * blockDim.x];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float f[8];
    unpack(v[j], f);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += f[i] * f[i];
  }
  const float r = rsqrtf(block_sum(sum) / (blockDim.x * kVectors * 8) + 1e-6f);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float f[8], w[8];
    unpack(v[j], f);
    unpack(weight[threadIdx.x + j * blockDim.x], w);
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] *= r * w[i];
    y[first + j * blockDim.x] = pack(f);
  }
  if (threadIdx.x == 0) inverse[blockIdx.x] = r;
}

// dx and per-CTA partial weight gradients; a CTA of 128 threads takes every gridDim-th row. Bytes: 6 an
// element (plus gridDim x columns x 4 of partials, not counted).
extern "C" __global__ void __launch_bounds__(128) rmsnorm_backward(const Vec8* dy, const Vec8* x, const Vec8* weight,
                                                                   const float* inverse, Vec8* dx, float* dweight,
                                                                   int rows) {
  float dw[kVectors][8] = {};
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long first = (long)row * blockDim.x * kVectors + threadIdx.x;
    Vec8 vx[kVectors], vg[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      vx[j] = x[first + j * blockDim.x];
      vg[j] = dy[first + j * blockDim.x];
    }
    const float r = inverse[row];
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float f[8], g[8], w[8];
      unpack(vx[j], f);
      unpack(vg[j], g);
      unpack(weight[threadIdx.x + j * blockDim.x], w);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dw[j][i] += g[i] * f[i] * r;
        dot += g[i] * w[i] * f[i] * r;
      }
    }
    dot = block_sum(dot) / (blockDim.x * kVectors * 8);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float f[8], g[8], w[8];
      unpack(vx[j], f);
      unpack(vg[j], g);
      unpack(weight[threadIdx.x + j * blockDim.x], w);
#pragma unroll
      for (int i = 0; i < 8; ++i) f[i] = r * (g[i] * w[i] - f[i] * r * dot);
      dx[first + j * blockDim.x] = pack(f);
    }
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      dweight[(long)blockIdx.x * blockDim.x * kVectors * 8 + (threadIdx.x + j * blockDim.x) * 8 + i] = dw[j][i];
}

// y = silu(g) * u, row = [g | u] of 2 x width vectors. Bytes: 6 an output element.
extern "C" __global__ void swiglu_forward(const Vec8* gu, Vec8* y, long vectors, int width) {
  const long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  const long in = at / width * 2 * width + at % width;
  float g[8], u[8];
  unpack(gu[in], g);
  unpack(gu[in + width], u);
#pragma unroll
  for (int i = 0; i < 8; ++i) g[i] = g[i] / (1.0f + __expf(-g[i])) * u[i];
  y[at] = pack(g);
}

// dg and du from dy, g and u. Bytes: 10 an element of y.
extern "C" __global__ void swiglu_backward(const Vec8* gu, const Vec8* dy, Vec8* dgu, long vectors, int width) {
  const long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  const long in = at / width * 2 * width + at % width;
  float g[8], u[8], d[8];
  unpack(gu[in], g);
  unpack(gu[in + width], u);
  unpack(dy[at], d);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float s = 1.0f / (1.0f + __expf(-g[i])), silu = g[i] * s;
    g[i] = d[i] * u[i] * (s + silu * (1.0f - s));
    u[i] = d[i] * silu;
  }
  dgu[in] = pack(g);
  dgu[in + width] = pack(u);
}

// y[i] = x[index[i]] by rows of blockDim vectors. Bytes: 4 an element.
extern "C" __global__ void gather_rows(const Vec8* x, const int* index, Vec8* y) {
  const long to = (long)blockIdx.x * blockDim.x + threadIdx.x;
  y[to] = x[(long)index[blockIdx.x] * blockDim.x + threadIdx.x];
}

// y[t] = sum over 8 rows k of weight[t, k] * x[index[t, k]]. Bytes: 18 an element of y.
extern "C" __global__ void combine_rows(const Vec8* x, const int* index, const float* weight, Vec8* y) {
  float sum[8] = {};
  Vec8 v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = x[(long)index[blockIdx.x * 8 + k] * blockDim.x + threadIdx.x];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float f[8];
    unpack(v[k], f);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += weight[blockIdx.x * 8 + k] * f[i];
  }
  y[(long)blockIdx.x * blockDim.x + threadIdx.x] = pack(sum);
}

// y = x transposed, bf16, 64 x 64 tiles, block 32 x 8. Bytes: 4 an element.
extern "C" __global__ void transpose_bf16(const __nv_bfloat162* x, __nv_bfloat162* y, int rows, int columns) {
  __shared__ bf16 tile[64][66];
  const long r0 = blockIdx.y * 64, c0 = blockIdx.x * 64;
  for (int r = threadIdx.y; r < 64; r += 8) {
    const __nv_bfloat162 v = x[((r0 + r) * columns + c0) / 2 + threadIdx.x];
    tile[r][2 * threadIdx.x] = v.x;
    tile[r][2 * threadIdx.x + 1] = v.y;
  }
  __syncthreads();
  for (int c = threadIdx.y; c < 64; c += 8) {
    __nv_bfloat162 v;
    v.x = tile[2 * threadIdx.x][c];
    v.y = tile[2 * threadIdx.x + 1][c];
    y[((c0 + c) * rows + r0) / 2 + threadIdx.x] = v;
  }
}

// Rotary embedding in place: rows of `heads` heads, 64 rotated columns each, pairs (i, i + 32).
// One thread does 8 pairs; cos and sin are (tokens, 32) float. Bytes: 4 an element.
extern "C" __global__ void rope(Vec8* x, const float* cosine, const float* sine, long work, int heads) {
  const long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= work) return;
  const long head = at / 4, part = at % 4, token = head / heads;
  float a[8], b[8];
  unpack(x[head * 8 + part], a);
  unpack(x[head * 8 + part + 4], b);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float c = cosine[token * 32 + part * 8 + i], s = sine[token * 32 + part * 8 + i], t = a[i];
    a[i] = t * c - b[i] * s;
    b[i] = b[i] * c + t * s;
  }
  x[head * 8 + part] = pack(a);
  x[head * 8 + part + 4] = pack(b);
}
