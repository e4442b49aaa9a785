// Calls a library of kernels as XLA does, without XLA or Python, and compares the results with plain loops in float64.
//
//   c++ -O2 -std=c++17 -I$(python -c 'import jax; print(jax.ffi.include_dir())') tests/ops/check_kernels.cc -o check -ldl
//   ./check src/headrace/native/kernels_avx2.so.1           compare; a line and exit status 1 for a difference
//   ./check src/headrace/native/kernels_avx2.so.1 20 5x5    the least time of 20 calls of one thread, in milliseconds (of 5x5)
//
// It shows what a library computes on a processor that only an emulator has (tests/ops/test_kernels_elsewhere.py), and, under
// callgrind, how many instructions a change costs.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

using std::vector;
typedef int64_t i64;

struct XLA_FFI_Error {
  std::string message;
};

namespace {

int64_t num_threads = 3;
std::atomic<int> running{0};  // threads that were begun: none may outlive main() and what it unloads

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
XLA_FFI_Error* count_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = num_threads;
  return nullptr;
}
XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  running++;
  std::thread([task = args->task, data = args->data] {
    task(data);
    running--;
  }).detach();
  return nullptr;
}

// An array of float32, bfloat16 or bytes, by its size.
struct Array {
  vector<i64> dims;
  XLA_FFI_DataType type;
  void* data;
  XLA_FFI_Buffer buffer;
};
Array array(float* data, vector<i64> dims) { return {dims, XLA_FFI_DataType_F32, data, {}}; }
Array array(uint16_t* data, vector<i64> dims) { return {dims, XLA_FFI_DataType_BF16, data, {}}; }
Array array(uint8_t* data, vector<i64> dims) { return {dims, XLA_FFI_DataType_U8, data, {}}; }

struct Call {
  XLA_FFI_Handler* handler;
  vector<Array> args, rets;
  std::map<std::string, i64> numbers;  // 64-bit attributes, sorted as XLA sorts them
  vector<i64> geometry;                // empty: has none
  std::map<std::string, bool> flags;

  void operator()() {
    XLA_FFI_Api api = {};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.XLA_FFI_Error_Create = create_error;
    api.XLA_FFI_ThreadPool_NumThreads = count_threads;
    api.XLA_FFI_ThreadPool_Schedule = schedule;
    vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
    vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
    auto pointers = [](vector<Array>& arrays) {
      vector<void*> found;
      for (Array& a : arrays) {
        a.buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, a.type, a.data, (i64)a.dims.size(), a.dims.data()};
        found.push_back(&a.buffer);
      }
      return found;
    };
    vector<void*> arg_pointers = pointers(args), ret_pointers = pointers(rets);
    XLA_FFI_Array span = {XLA_FFI_DataType_S64, geometry.size(), geometry.data()};
    std::deque<XLA_FFI_Scalar> scalars;
    std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> all;
    if (!geometry.empty()) all["geometry"] = {XLA_FFI_AttrType_ARRAY, &span};
    for (auto& [name, value] : numbers) {
      scalars.push_back({XLA_FFI_DataType_S64, &value});
      all[name] = {XLA_FFI_AttrType_SCALAR, &scalars.back()};
    }
    for (auto& [name, value] : flags) {
      scalars.push_back({XLA_FFI_DataType_PRED, &value});
      all[name] = {XLA_FFI_AttrType_SCALAR, &scalars.back()};
    }
    vector<XLA_FFI_AttrType> types;
    std::deque<XLA_FFI_ByteSpan> spans;
    vector<XLA_FFI_ByteSpan*> names;
    vector<void*> values;
    for (auto& [name, value] : all) {
      types.push_back(value.first);
      spans.push_back({name.data(), name.size()});
      names.push_back(&spans.back());
      values.push_back(value.second);
    }
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, (i64)args.size(), arg_types.data(), arg_pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, (i64)rets.size(), ret_types.data(), ret_pointers.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, (i64)types.size(), types.data(), names.data(), values.data()};
    if (XLA_FFI_Error* error = handler(&frame)) {
      fprintf(stderr, "a call was refused: %s\n", error->message.c_str());
      exit(2);
    }
  }
};

uint32_t state = 1;
float uniform() {  // -1 to 1
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / (1 << 23) - 1.f;
}
float widened(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
float widened(float value) { return value; }
template <class T> T narrowed(float value);
template <> float narrowed(float value) { return value; }
template <> uint16_t narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class T> vector<T> random_values(i64 count) {
  vector<T> values(count);
  for (T& v : values) v = narrowed<T>(uniform());
  return values;
}

enum Method : i64 { kProducts, kWinograd, kDepthwise, kGrouped };  // as in kernels.cc
struct Shape {
  Method method;
  i64 n, h, w, c, kernel, o, stride, group;  // `group`: the inputs of each output
  i64 before() const { return (kernel - 1) / 2; }
  i64 ho() const { return (h + stride - 1) / stride; }
  i64 wo() const { return (w + stride - 1) / stride; }
  i64 outputs() const { return n * ho() * wo() * o; }
  i64 inputs() const { return n * h * w * c; }
  i64 weights() const { return kernel * kernel * group * o; }
  vector<i64> geometry() const {
    return {n, h, w, c, kernel, kernel, o, stride, before(), before(), ho(), wo(), method == kDepthwise ? c : group};
  }
  // f(number of the output, of the input, of the weight) for all products
  template <class F> void each_product(const F& f) const {
    for (i64 image = 0; image < n; image++)
      for (i64 y = 0; y < ho(); y++)
        for (i64 x = 0; x < wo(); x++)
          for (i64 i = 0; i < kernel; i++)
            for (i64 j = 0; j < kernel; j++) {
              const i64 row = y * stride - before() + i, column = x * stride - before() + j;
              if (row < 0 || row >= h || column < 0 || column >= w) continue;
              for (i64 k = 0; k < group; k++)
                for (i64 to = 0; to < o; to++)
                  f(((image * ho() + y) * wo() + x) * o + to, ((image * h + row) * w + column) * c + to / (o / (c / group)) * group + k,
                    ((i * kernel + j) * group + k) * o + to);
            }
  }
};

int failures = 0;
// The largest difference must be within `limit` of the largest value.
template <class T> void compare(const std::string& name, const vector<T>& found, const vector<double>& expected, double limit) {
  double largest = 0, difference = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    largest = std::max(largest, std::abs(expected[i]));
    const double d = std::abs((double)widened(found[i]) - expected[i]);
    difference = d <= difference ? difference : d;  // NaN stays
  }
  const bool is_right = difference <= limit * largest;
  printf("%-72s %.1e%s\n", name.c_str(), difference / largest, is_right ? "" : "  WRONG");
  failures += !is_right;
}

double activated(i64 act, double v) {
  const double clipped = std::min(6.0, std::max(0.0, v + 3));
  return act == 1 ? std::max(v, 0.0) : act == 2 ? std::min(6.0, std::max(0.0, v)) : act == 3 ? v / (1 + std::exp(-v)) : act == 4 ? v * clipped / 6 : v;
}
double slope(i64 act, double v) {
  const double s = 1 / (1 + std::exp(-v));
  return act == 1 ? v > 0 : act == 2 ? v > 0 && v < 6 : act == 3 ? s * (1 + v * (1 - s)) : act == 4 ? (v <= -3 ? 0 : v < 3 ? (2 * v + 3) / 6 : 1) : 1;
}

void* library;
XLA_FFI_Handler* function(const std::string& name) {
  auto found = (XLA_FFI_Handler*)dlsym(library, name.c_str());
  if (!found) fprintf(stderr, "%s is missing\n", name.c_str()), exit(2);
  return found;
}
template <class T> std::string name_of(const char* call) {
  return std::string("hr_") + call + (sizeof(T) == 2 ? "_half" : "");
}

// One convolution: with statistics; with what follows it; its gradients alone, and behind a norm and an activation.
template <class T> struct Unit {
  Shape s;
  i64 act;
  vector<T> x, w, dy, z, residual, y, dx, dw;
  vector<float> scale, centre, shift, slope_, constant, mean, variance;
  Unit(const Shape& shape, i64 activation) : s(shape), act(activation) {
    x = random_values<T>(s.inputs()), w = random_values<T>(s.weights()), dy = random_values<T>(s.outputs());
    z = random_values<T>(s.outputs()), residual = random_values<T>(s.outputs());
    scale = random_values<float>(s.o), shift = random_values<float>(s.o), slope_ = random_values<float>(s.o);
    constant = random_values<float>(s.o), centre = random_values<float>(s.o);
    y.resize(s.outputs()), dx.resize(s.inputs()), dw.resize(s.weights()), mean.resize(s.o), variance.resize(s.o);
  }
  vector<i64> images(i64 h, i64 w_, i64 c) const { return {s.n, h, w_, c}; }
  Array outputs(vector<T>& v) { return array(v.data(), images(s.ho(), s.wo(), s.o)); }
  Array vector_of(vector<float>& v) { return array(v.data(), {s.o}); }
  Array image() { return array(x.data(), images(s.h, s.w, s.c)); }
  Array weights() { return array(w.data(), {s.kernel, s.kernel, s.group, s.o}); }
  Call forward(bool statistics, bool follows) {
    Call call = {function(name_of<T>("convolve")), {image(), weights()}, {outputs(y)}, {}, s.geometry(), {{"packed", false}}};
    call.numbers = {{"method", s.method}, {"products", 0}, {"activation", follows ? act : 0}};
    if (follows) call.args.insert(call.args.end(), {vector_of(scale), vector_of(shift), outputs(residual)});
    if (statistics) call.rets.insert(call.rets.end(), {vector_of(mean), vector_of(variance)});
    return call;
  }
  Call backward(bool behind_norm) {
    Call call = {function(name_of<T>("gradients")), {outputs(dy), image(), weights()}, {}, {}, s.geometry(), {}};
    call.rets = {array(dw.data(), weights().dims), array(dx.data(), image().dims)};
    call.numbers = {{"method", s.method}, {"products", 0}, {"activation", behind_norm ? act : 0}, {"wants", 3}};
    if (behind_norm)
      call.args.insert(call.args.end(), {outputs(z), vector_of(scale), vector_of(centre), vector_of(shift), vector_of(slope_),
                                         vector_of(constant)});
    return call;
  }
  vector<double> convolved() const {
    vector<double> sums(s.outputs());
    s.each_product([&](i64 to, i64 from, i64 weight) { sums[to] += (double)widened(x[from]) * widened(w[weight]); });
    return sums;
  }
  void check(const std::string& what) {
    const double limit = sizeof(T) == 2 ? 8e-3 : s.method == kWinograd ? 2e-5 : 4e-6;
    const vector<double> sums = convolved();
    const i64 pixels = s.n * s.ho() * s.wo();
    forward(true, false)();
    compare(what + " convolution", y, sums, limit);
    vector<double> means(s.o), variances(s.o);
    for (size_t i = 0; i < sums.size(); i++) means[i % s.o] += widened(y[i]) / (double)pixels;
    for (size_t i = 0; i < sums.size(); i++) variances[i % s.o] += std::pow(widened(y[i]) - means[i % s.o], 2) / pixels;
    compare(what + " mean", mean, means, 1e-5);
    compare(what + " variance", variance, variances, 1e-5);
    if (sizeof(T) == 4) {
      vector<double> expected(sums);
      for (size_t i = 0; i < sums.size(); i++)
        expected[i] = activated(act, sums[i] * scale[i % s.o] + shift[i % s.o] + widened(residual[i]));
      forward(false, true)();
      compare(what + " with what follows", y, expected, limit);
    }
    for (bool behind_norm : {false, true}) {
      vector<double> d(s.outputs()), weight_gradient(s.weights()), image_gradient(s.inputs());
      for (size_t i = 0; i < d.size(); i++) {
        const i64 o = i % s.o;
        d[i] = widened(dy[i]);
        const double v = (double)widened(z[i]) - centre[o];
        if (behind_norm) d[i] = d[i] * slope(act, v * scale[o] + shift[o]) * scale[o] + v * slope_[o] + constant[o];
      }
      s.each_product([&](i64 to, i64 from, i64 weight) {
        weight_gradient[weight] += d[to] * widened(x[from]);
        image_gradient[from] += d[to] * widened(w[weight]);
      });
      backward(behind_norm)();
      const std::string end = behind_norm ? " behind a norm" : "";
      compare(what + " weights' gradient" + end, dw, weight_gradient, limit);
      compare(what + " images' gradient" + end, dx, image_gradient, limit);
    }
  }
};

template <class T> void check_rows(i64 act) {
  const std::string what = std::string(sizeof(T) == 2 ? "bfloat16" : "float32") + " rows, activation " + std::to_string(act);
  const i64 rows = 700, o = 24;
  const double limit = sizeof(T) == 2 ? 8e-3 : 4e-6;
  auto dy = random_values<T>(rows * o), z = random_values<T>(rows * o), y = dy;
  auto scale = random_values<float>(o), shift = random_values<float>(o), mean = random_values<float>(o), sum = mean, moment = mean;
  auto values = [&](vector<T>& v) { return array(v.data(), {1, 1, rows, o}); };
  auto numbers = [&](vector<float>& v) { return array(v.data(), {o}); };
  vector<double> expected(rows * o), sums(o), moments(o);
  for (i64 i = 0; i < rows * o; i++) {
    const double u = (double)widened(z[i]) - mean[i % o], v = u * scale[i % o] + shift[i % o];
    const double d = widened(dy[i]) * slope(act, v);
    expected[i] = activated(act, v);
    sums[i % o] += d, moments[i % o] += d * u;
  }
  Call{function(name_of<T>("activate")), {values(z), numbers(scale), numbers(mean), numbers(shift)}, {values(y)}, {{"activation", act}}, {}, {}}();
  compare(what, y, expected, limit);
  Call{function(name_of<T>("sums")), {values(dy), values(z), numbers(scale), numbers(mean), numbers(shift)},
       {numbers(sum), numbers(moment)}, {{"activation", act}}, {}, {}}();
  compare(what + ", sums of the gradient", sum, sums, 1e-5);
  compare(what + ", its products with z", moment, moments, 1e-5);
}

template <class T> void check_pool() {
  const i64 n = 2, h = 9, w = 11, c = 21, ho = 5, wo = 6;
  const vector<i64> geometry = {n, h, w, c, 3, 3, c, 2, 1, 1, ho, wo, c};
  auto x = random_values<T>(n * h * w * c), y = random_values<T>(n * ho * wo * c), dy = y, dx = x;
  vector<uint8_t> places(y.size());
  vector<double> largest(y.size(), -1e9), gradient(x.size());
  vector<i64> place(y.size());
  for (i64 i = 0; i < n * ho * wo * c; i++) {
    const i64 k = i % c, q = i / c % wo, r = i / c / wo % ho, image = i / c / wo / ho;
    for (i64 a = 2 * r - 1; a < 2 * r + 2; a++)
      for (i64 b = 2 * q - 1; b < 2 * q + 2; b++) {
        const i64 at = ((image * h + a) * w + b) * c + k;
        if (a >= 0 && b >= 0 && a < h && b < w && widened(x[at]) > largest[i]) largest[i] = widened(x[at]), place[i] = at;
      }
    gradient[place[i]] += widened(dy[i]);
  }
  const std::string what = sizeof(T) == 2 ? "bfloat16 max pooling" : "float32 max pooling";
  const vector<i64> in = {n, h, w, c}, out = {n, ho, wo, c};
  Call{function(name_of<T>("max_pool")), {array(x.data(), in)}, {array(y.data(), out), array(places.data(), out)}, {}, geometry, {}}();
  compare(what, y, largest, 0);
  Call{function(name_of<T>("max_pool_gradient")), {array(dy.data(), out), array(places.data(), out)}, {array(dx.data(), in)}, {}, geometry, {}}();
  compare(what + ", gradient", dx, gradient, sizeof(T) == 2 ? 8e-3 : 1e-6);
}

void check() {
  const char* methods[] = {"products", "Winograd", "depthwise", "grouped"};
  const vector<Shape> shapes = {
      {kProducts, 2, 9, 7, 3, 7, 40, 2, 3},          {kProducts, 3, 8, 8, 20, 3, 33, 1, 20},
      {kProducts, 5, 4, 4, 48, 1, 70, 1, 48},        {kProducts, 1, 5, 6, 96, 3, 300, 2, 96},  // many weights
      {kWinograd, 3, 10, 7, 32, 3, 48, 1, 32},       {kWinograd, 2, 7, 7, 160, 3, 160, 1, 160},  // many weights, few pixels
      {kWinograd, 130, 3, 3, 160, 3, 160, 1, 160},   // many weights, many tiles
      {kDepthwise, 2, 19, 13, 40, 3, 40, 1, 1},      {kDepthwise, 2, 19, 13, 40, 3, 40, 2, 1},
      {kDepthwise, 2, 14, 14, 24, 5, 24, 1, 1},      {kDepthwise, 2, 15, 14, 24, 5, 24, 2, 1},
      {kDepthwise, 2, 5, 7, 6, 3, 6, 1, 1},          {kGrouped, 2, 9, 8, 32, 3, 32, 1, 4},
      {kGrouped, 2, 9, 8, 96, 3, 96, 2, 24},
  };
  i64 act = 0;
  for (const Shape& s : shapes) {
    const std::string what = std::string(methods[s.method]) + " " + std::to_string(s.kernel) + "x" + std::to_string(s.kernel) + "/" +
                             std::to_string(s.stride) + " of " + std::to_string(s.n) + "x" + std::to_string(s.h) + "x" +
                             std::to_string(s.w) + "x" + std::to_string(s.c);
    act = (act + 1) % 3;  // those that may follow a residual
    Unit<float>(s, act).check("float32 " + what);
    if (s.method == kWinograd || s.method == kDepthwise) Unit<uint16_t>(s, act).check("bfloat16 " + what);
  }
  for (i64 a = 0; a < 5; a++) check_rows<float>(a), check_rows<uint16_t>(a);
  check_pool<float>();
  check_pool<uint16_t>();
}

std::string wanted;  // a part of the names of what is timed
template <class T> void time_unit(const char* name, const Shape& s, i64 act, int calls) {
  if (!strstr(name, wanted.c_str())) return;
  Unit<T> u(s, act);
  for (auto& [part, call] : std::map<std::string, Call>{
           {"forward", u.forward(true, false)}, {"inference", u.forward(false, sizeof(T) == 4)}, {"gradients", u.backward(true)}}) {
    double least = 1e9;
    for (int i = 0; i < calls; i++) {
      const auto start = std::chrono::steady_clock::now();
      call();
      least = std::min(least, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    printf("%-28s %-10s %8.3f\n", name, part.c_str(), least);
  }
}
void time_all(int calls) {
  num_threads = 1;
  time_unit<float>("Winograd 16x16x64", {kWinograd, 4, 16, 16, 64, 3, 64, 1, 64}, 1, calls);
  time_unit<float>("Winograd 7x7x512", {kWinograd, 2, 7, 7, 512, 3, 512, 1, 512}, 1, calls);
  time_unit<float>("products 1x1 14x14x256", {kProducts, 2, 14, 14, 256, 1, 256, 1, 256}, 1, calls);
  time_unit<float>("products 3x3/2 28x28x64", {kProducts, 2, 28, 28, 64, 3, 128, 2, 64}, 1, calls);
  time_unit<float>("products 7x7/2 56x56x3", {kProducts, 2, 56, 56, 3, 7, 64, 2, 3}, 1, calls);
  time_unit<float>("grouped 3x3 14x14x128", {kGrouped, 2, 14, 14, 128, 3, 128, 1, 8}, 1, calls);
  for (i64 act : {1, 2}) {
    time_unit<float>("depthwise 3x3 28x28x96", {kDepthwise, 2, 28, 28, 96, 3, 96, 1, 1}, act, calls);
    time_unit<float>("depthwise 3x3/2 28x28x96", {kDepthwise, 2, 28, 28, 96, 3, 96, 2, 1}, act, calls);
    time_unit<float>("depthwise 5x5 14x14x96", {kDepthwise, 2, 14, 14, 96, 5, 96, 1, 1}, act, calls);
    time_unit<float>("depthwise 5x5 7x7x192", {kDepthwise, 2, 7, 7, 192, 5, 192, 1, 1}, act, calls);
  }
  time_unit<uint16_t>("bfloat16 depthwise 3x3", {kDepthwise, 2, 28, 28, 96, 3, 96, 1, 1}, 1, calls);
  time_unit<uint16_t>("bfloat16 Winograd", {kWinograd, 4, 16, 16, 64, 3, 64, 1, 64}, 1, calls);
}

}  // namespace

int main(int count, char** words) {
  if (count < 2 || !(library = dlopen(words[1], RTLD_NOW))) {
    fprintf(stderr, "%s\n", count < 2 ? "usage: check LIBRARY [CALLS [NAME]]" : dlerror());
    return 2;
  }
  if (!((int (*)())dlsym(library, "hr_runs_here"))()) {
    printf("these kernels are not for this processor\n");
    return 2;
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);  // a crash shows what came before it
  if (count > 3) wanted = words[3];
  if (count > 2)
    time_all(atoi(words[2]));
  else
    check();
  printf("%d floats in a vector; %d differences\n", ((int (*)())dlsym(library, "hr_lanes"))(), failures);
  while (running) std::this_thread::yield();
  return failures > 0;
}
