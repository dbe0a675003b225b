// Draws tokens over large vocabularies without sorting them: what the filters leave is always a Cut, and to find
// one, histograms narrow the tokens down to the few around its border, which alone are sorted.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "isa.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr long kSlack = 16;  // items that kernels may write behind a list
constexpr long kSortable = 64;
constexpr int kBins = 1024;

// How a row draws.
struct Rule {
  double temperature;  // 0: greedy
  long top_k;          // 0: none
  double top_p, min_p;
  uint32_t key[2];
};

// Some tokens in the order of their ids; with weights where their mass is asked for.
struct Candidates {
  float* values;
  int* ids;
  float* weights;
  long count;

  double weight(long i) const { return weights ? double(weights[i]) : 1.0; }

  void move(long from, long to) const {
    values[to] = values[from], ids[to] = ids[from];
    if (weights) weights[to] = weights[from];
  }
};

// The bins of a histogram from the largest value down to the smallest. In float32: what matters is that a
// smaller value is never in an earlier bin, and that the two ends are apart.
class Bins {
 public:
  Bins(float high, float low) : half_high_(high * 0.5f), scale_((kBins - 1) / (high * 0.5f - low * 0.5f)) {}

  bool is_usable() const { return std::isfinite(scale_); }

  // Calls visit(i, bin) for the values in order.
  template <class Visit>
  void each(const float* values, long count, Visit&& visit) const {
    constexpr long kStride = 64;
    int bins[kStride];
    for (long begin = 0; begin < count; begin += kStride) {
      long n = std::min(kStride, count - begin);
      for (long i = 0; i < n; ++i) {
        float place = (half_high_ - values[begin + i] * 0.5f) * scale_;
        bins[i] = int(place < kBins - 1 ? place : kBins - 1);
      }
      for (long i = 0; i < n; ++i) visit(begin + i, bins[i]);
    }
  }

 private:
  float half_high_, scale_;
};

std::pair<float, float> range_of(const float* values, long count) {
  constexpr long kLanes = 16;
  float low[kLanes], high[kLanes];
  std::fill_n(low, kLanes, kInfinity), std::fill_n(high, kLanes, -kInfinity);
  long i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (long l = 0; l < kLanes; ++l) {
      low[l] = values[i + l] < low[l] ? values[i + l] : low[l];
      high[l] = values[i + l] > high[l] ? values[i + l] : high[l];
    }
  for (; i < count; ++i) low[0] = std::min(low[0], values[i]), high[0] = std::max(high[0], values[i]);
  return {*std::min_element(low, low + kLanes), *std::max_element(high, high + kLanes)};
}

// The border of the longest run of best tokens in which the weight before each is less than `target`, at least
// one token. There are tokens, all finite; the list is used up.
Cut find_border(Candidates c, double target) {
  double before = 0;
  while (c.count > kSortable) {
    auto [low, high] = range_of(c.values, c.count);
    Bins bins(high, low);
    if (low == high || !bins.is_usable()) break;
    double mass[kBins] = {};
    bins.each(c.values, c.count, [&](long i, int bin) { mass[bin] += c.weight(i); });
    // The bin of the border; where rounding keeps the sum below the target, the last one.
    int border = 0;
    double sum = before;
    for (int bin = 0; bin < kBins; ++bin) {
      if (mass[bin] == 0) continue;
      border = bin, before = sum, sum += mass[bin];
      if (sum >= target) break;
    }
    long kept = 0;
    bins.each(c.values, c.count, [&](long i, int bin) {
      if (bin == border) c.move(i, kept++);
    });
    c.count = kept;
  }
  std::vector<int> order(c.count);
  std::iota(order.begin(), order.end(), 0);
  auto is_better = [&](int a, int b) { return c.values[a] > c.values[b]; };
  // Many equal ones are in order as they are.
  if (!std::is_sorted(order.begin(), order.end(), is_better)) std::stable_sort(order.begin(), order.end(), is_better);
  int last = order[0];
  for (int i : order) {
    last = i, before += c.weight(i);
    if (before >= target) break;
  }
  return {c.values[last], c.ids[last]};
}

// One row; `maxima` and the list are scratch.
class Row {
 public:
  Row(const float* x, long n, const Rule& rule, float* maxima, Candidates list)
      : x_(x), n_(n), rule_(rule), maxima_(maxima), list_(list) {}

  int pick() {
    if (!use_.block_maxima(x_, n_, maxima_)) return -1;
    const float* block = std::max_element(maxima_, maxima_ + num_blocks());
    top_ = *block;
    long begin = (block - maxima_) * kSampleBlock;
    int best = int(std::find(x_ + begin, x_ + std::min(begin + kSampleBlock, n_), top_) - x_);
    if (rule_.temperature == 0 || std::isinf(top_)) return best;
    if (rule_.top_k && rule_.top_k < n_) keep_top_k();
    if (rule_.top_p < 1) keep_top_p();
    if (rule_.min_p > 0) {
      float floor = top_ + std::min(float(std::log(rule_.min_p)), 0.0f);
      if (floor > cut_.least) cut_ = {floor, kAny};
    }
    Draw draw{top_, rule_.temperature, {rule_.key[0], rule_.key[1]}, cut_, -kInfinity, best};
    // The best token first: most others cannot beat it, whatever their noise.
    use_.draw(x_ + best, best, 1, draw);
    each_block([&](long first, long count) { use_.draw(x_ + first, first, count, draw); });
    return draw.token;
  }

 private:
  long num_blocks() const { return (n_ + kSampleBlock - 1) / kSampleBlock; }

  // Blocks that may have tokens of the cut.
  template <class Visit>
  void each_block(Visit&& visit) const {
    for (long b = 0; b < num_blocks(); ++b)
      if (maxima_[b] >= cut_.least) visit(b * kSampleBlock, std::min(kSampleBlock, n_ - b * kSampleBlock));
  }

  // The tokens of the cut, `weights` to be filled in.
  Candidates collect(float* weights) const {
    Candidates found{list_.values, list_.ids, weights, 0};
    each_block([&](long first, long count) {
      found.count += use_.collect(x_ + first, first, count, cut_, found.values + found.count, found.ids + found.count);
    });
    return found;
  }

  void keep_top_k() {
    // Each of the k largest maxima stands for a token, so the k best are not below the last of them.
    if (rule_.top_k <= num_blocks()) {
      float* sorted = list_.values;
      std::copy(maxima_, maxima_ + num_blocks(), sorted);
      std::nth_element(sorted, sorted + rule_.top_k - 1, sorted + num_blocks(), std::greater<>());
      cut_ = {sorted[rule_.top_k - 1], kAny};
    }
    cut_ = find_border(collect(nullptr), double(rule_.top_k));
  }

  void keep_top_p() {
    double total = 0;
    if (cut_.least == kLowest) total = use_.weigh(x_, n_, top_, nullptr);
    else total = use_.weigh(list_.values, collect(nullptr).count, top_, nullptr);
    // Lighter tokens than this have less than 1 - top_p of the mass together, so the border is above them.
    double light = (1 - rule_.top_p) * total / double(n_);
    float least = float(top_ + std::log(light) - 1e-3 - 1e-6 * std::abs(top_));
    if (light > 0 && least > cut_.least) cut_ = {least, kAny};
    Candidates candidates = collect(list_.weights);
    use_.weigh(candidates.values, candidates.count, top_, candidates.weights);
    cut_ = find_border(candidates, rule_.top_p * total);
  }

  const Kernels& use_ = kernels();
  const float* x_;
  long n_;
  const Rule& rule_;
  float* maxima_;
  Candidates list_;
  float top_ = 0;
  Cut cut_{kLowest, kAny};  // without the tokens at -inf
};

int pick(const float* x, long n, const Rule& rule) {
  if (rule.temperature == 0) return int(kernels().argmax(x, n));
  long blocks = (n + kSampleBlock - 1) / kSampleBlock, room = (n + 2 * kSlack) / kSlack * kSlack;
  bool has_list = rule.top_k || rule.top_p < 1;
  float* maxima = scratch(0, (blocks + kSlack) + (has_list ? 3 * room : 0));
  float* values = maxima + (blocks + kSlack) / kSlack * kSlack;
  Candidates list{values, reinterpret_cast<int*>(values + room), values + 2 * room, 0};
  return Row(x, n, rule, maxima, list).pick();
}

class SampleTokens : public CpuPrimitive {
 public:
  SampleTokens(mx::Stream stream, std::vector<Rule> rules) : CpuPrimitive(stream), rules_(std::move(rules)) {}

  const char* name() const override { return "MlxserveSampleTokens"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array logits = dense(inputs[0], encoder);
    encoder.dispatch([from = logits.data<float>(), to = outputs[0].data<int>(), size = long(logits.shape(1)),
                      rules = rules_] {
      parallel_for(long(rules.size()), [&](long row) { to[row] = pick(from + row * size, size, rules[row]); });
    });
  }

 private:
  std::vector<Rule> rules_;
};

}  // namespace

mx::array sample_tokens(const mx::array& logits, const std::vector<double>& temperature, const std::vector<int64_t>& top_k,
                        const std::vector<double>& top_p, const std::vector<double>& min_p,
                        const std::vector<std::pair<uint32_t, uint32_t>>& keys) {
  const char* op = "sample_tokens";
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0, op,
          ": logits must be float32 [R, V]");
  std::size_t rows = logits.shape(0);
  for (std::size_t size : {temperature.size(), top_k.size(), top_p.size(), min_p.size(), keys.size()})
    require(size == rows, op, ": ", rows, " rows need as many parameters, got ", size);
  std::vector<Rule> rules;
  for (std::size_t i = 0; i < rows; ++i) {
    require(temperature[i] >= 0, op, ": temperature must be at least 0, got ", temperature[i]);
    require(top_k[i] >= 0, op, ": top_k must be 0 (none) or more, got ", top_k[i]);
    require(top_p[i] >= 0, op, ": top_p must be at least 0, got ", top_p[i]);
    require(min_p[i] >= 0, op, ": min_p must be at least 0, got ", min_p[i]);
    rules.push_back({temperature[i], long(top_k[i]), top_p[i], min_p[i], {keys[i].first, keys[i].second}});
  }
  return mx::array({logits.shape(0)}, mx::int32, std::make_shared<SampleTokens>(cpu_stream(), std::move(rules)),
                   {logits});
}

}  // namespace mlxserve
