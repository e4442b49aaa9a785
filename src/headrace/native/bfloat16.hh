// Convolutions of bfloat16 images by products of bfloat16 values, for kernels.cc.
#pragma once
#include <vector>

#include "tasks.hh"

namespace headrace::bfloat16 {

struct Behind {
  const float *scale, *shift;  // null where nothing follows
  const Half* residual;
  i64 act;
};

// y = convolution of x; with scale and shift, y = activation(y scale + shift + residual). `is_packed`: w is the result of
// PackHalf. `sums`, if not null, becomes the sums [task][2][channel] of y, as it is rounded, and of its squares.
void convolve(const Threads& pool, i64 products, const Geometry& g, const Half* x, const Half* w, bool is_packed, Half* y,
              const Behind& b, std::vector<double>* sums);

// The gradient behind a convolution: dy or, with z, that of norm and activation, formed of dy and z and rounded.
struct Gradient {
  const Half *dy, *z;
  NormGradient norm;
  i64 act;
  Half* memory;  // for all of it: needed with z for dx, unless the convolution is pointwise
};

// The gradients of weights and images; null where they are not wanted.
void gradients(const Threads& pool, i64 products, const Geometry& g, const Half* x, const Half* w, const Gradient& d, Half* dw,
               Half* dx);

}  // namespace headrace::bfloat16
