// Causal attention and its gradient, block by block. Included by training_isa.cpp alone, behind block_product.h.
//
// The scheme is that of FlashAttention (Dao et al., 2022, arXiv:2205.14135): sums over keys go along with the largest
// score so far, and the gradient computes the shares again from the logarithm of their sum.

constexpr long BLOCK = kAttentionBlock;

INLINE long blocks_of(long length) { return ceil_div(length, BLOCK); }

// Lanes from j on that are from `from` to `to` - 1.
INLINE vi lanes_within(long j, long from, long to) {
  vi lane;
  for (int l = 0; l < W; ++l) lane[l] = l;
  return (lane >= (int)(from - j)) & (lane < (int)(to - j));
}

// The scores of a row of a block; `bent` is the tanh of capped ones.
INLINE vf score_of(const CausalHead& h, vf product, vf& bent) {
  vf score = product * h.scale;
  if (h.softcap == 0) return score;
  bent = tanh_of(score / h.softcap);
  return bent * h.softcap;
}

// Which keys of a block a query sees: of these, `from` to `to` - 1.
struct Seen {
  long from, to;
  INLINE_MEMBER Seen(const CausalHead& h, long query, long block)
      : from(most(h.first_keys[query] - block * BLOCK, 0)), to(least(query + 1 - block * BLOCK, BLOCK)) {}
  INLINE_MEMBER bool is_none() const { return from >= to; }
  INLINE_MEMBER bool is_all() const { return from == 0 && to == BLOCK; }
};

static std::size_t causal_scratch_floats(const CausalHead& h) {
  return BLOCK * BLOCK + BLOCK * h.padded_value_dim + 2 * BLOCK;
}

// Products of a row with the keys of a block become weights; what was summed up before is scaled down.
INLINE void weigh_row(const CausalHead& h, const Seen& seen, float* row, float& top, float& total, float* sums) {
  if (seen.is_none()) {
    for (long j = 0; j < BLOCK; j += W) store(row + j, (vf){});
    return;
  }
  const vf nothing = splat(-__builtin_inff());
  vf largest = nothing;
  for (long j = 0; j < BLOCK; j += W) {
    vf bent = {}, score = score_of(h, load(row + j), bent);
    if (!seen.is_all()) score = lanes_within(j, seen.from, seen.to) ? score : nothing;
    largest = greater(score, largest);
    store(row + j, score);
  }
  const float now = top > greatest(largest) ? top : greatest(largest);
  vf added = {};
  for (long j = 0; j < BLOCK; j += W) {
    vf weight = exp_negative(load(row + j) - now);
    added = added + weight;
    store(row + j, weight);
  }
  if (now != top) {
    const float factor = exp_negative(top - now);
    for (long i = 0; i < h.padded_value_dim; i += W) store(sums + i, load(sums + i) * factor);
    total = total * factor;
  }
  top = now, total += sum(added);
}

static void attend_causal(const CausalHead& h, long begin, long end, float* out, long out_row, float* log_sums,
                          float* scratch) {
  float *scores = scratch, *sums = scores + BLOCK * BLOCK;
  float *tops = sums + BLOCK * h.padded_value_dim, *totals = tops + BLOCK;
  const long rows = end - begin, width = h.padded_value_dim;
  for (long row = 0; row < rows; ++row) tops[row] = -__builtin_inff(), totals[row] = 0;
  for (long i = 0; i < rows * width; i += W) store(sums + i, (vf){});
  for (long block = h.first_keys[begin] / BLOCK; block * BLOCK < end; ++block) {
    multiply_blocks({rows, BLOCK, h.dim, h.q + begin * h.q_row, h.q_row, 1, h.turned_keys + block * h.dim * BLOCK,
                     BLOCK, scores, BLOCK, false});
    for (long row = 0; row < rows; ++row)
      weigh_row(h, Seen(h, begin + row, block), scores + row * BLOCK, tops[row], totals[row], sums + row * width);
    multiply_blocks({rows, width, BLOCK, scores, BLOCK, 1, h.values + block * BLOCK * width, width, sums, width, true});
  }
  for (long row = 0; row < rows; ++row) {
    const vf total = splat(totals[row]);
    for (long i = 0; i < h.value_dim; i += W) {
      vf value = load(sums + row * width + i) / total;
      if (i + W <= h.value_dim) store(out + row * out_row + i, value);
      else store_first(out + row * out_row + i, value, h.value_dim - i);
    }
    log_sums[row] = tops[row] + __builtin_logf(totals[row]);
  }
}

// Rows of `dim` values to rows of `padded`, zeros behind; rows behind the last become zeros.
static void pad_rows(const float* from, long row, long rows, long dim, long padded, float* to) {
  for (long r = 0; r < rows; ++r, to += padded)
    for (long i = 0; i < padded; i += W) {
      const long n = least(dim - i, W);
      store(to + i, n <= 0 ? (vf){} : n < W ? load_first(from + r * row + i, n) : load(from + r * row + i));
    }
  for (long left = (blocks_of(rows) * BLOCK - rows) * padded, i = 0; i < left; i += W) store(to + i, (vf){});
}

static std::size_t causal_gradient_scratch_floats(const CausalHead& h) {
  return blocks_of(h.length) * BLOCK * (2 * h.padded_dim + h.padded_value_dim + 1) + 2 * BLOCK * BLOCK;
}

// Products with keys become weights, products with values the gradients of scores, of one query.
INLINE void score_gradients(const CausalHead& h, const Seen& seen, float log_sum, float delta, float* weights,
                            float* gradients) {
  for (long j = 0; j < BLOCK; j += W) {
    vf bent = {}, x = score_of(h, load(weights + j), bent) - log_sum;
    vf weight = exp_negative(x > (vf){} ? (vf){} : x);
    if (!seen.is_all()) weight = lanes_within(j, seen.from, seen.to) ? weight : (vf){};
    vf gradient = weight * (load(gradients + j) - delta) * h.scale;
    if (h.softcap != 0) gradient = gradient * (1.0f - bent * bent);
    if (!seen.is_all()) gradient = lanes_within(j, seen.from, seen.to) ? gradient : (vf){};
    store(weights + j, weight);
    store(gradients + j, gradient);
  }
}

static void causal_gradient(const CausalHead& h, const CausalHeadGradient& g, float* scratch) {
  const long blocks = blocks_of(h.length), positions = blocks * BLOCK, dim = h.padded_dim, width = h.padded_value_dim;
  float *q = scratch, *d_q = q + positions * dim, *d_out = d_q + positions * dim, *deltas = d_out + positions * width;
  float *weights = deltas + positions, *gradients = weights + BLOCK * BLOCK;
  pad_rows(h.q, h.q_row, h.length, h.dim, dim, q);
  pad_rows(g.d_out, g.d_out_row, h.length, h.value_dim, width, d_out);
  for (long i = 0; i < positions * dim; i += W) store(d_q + i, (vf){}), store(g.d_keys + i, (vf){});
  for (long i = 0; i < positions * width; i += W) store(g.d_values + i, (vf){});
  for (long row = 0; row < h.length; ++row) {
    vf products = {};
    const float *out = g.out + row * g.out_row, *back = d_out + row * width;
    long i = 0;
    for (; i + W <= h.value_dim; i += W) products = fma(load(out + i), load(back + i), products);
    if (i < h.value_dim) products = fma(load_first(out + i, h.value_dim - i), load(back + i), products);
    deltas[row] = sum(products);
  }
  for (long block = 0; block < blocks; ++block) {
    const long key = block * BLOCK;
    for (long first = key; first < h.length && h.first_keys[first] < key + BLOCK; first += BLOCK) {
      const long rows = least(BLOCK, h.length - first);
      multiply_blocks({rows, BLOCK, h.dim, q + first * dim, dim, 1, h.turned_keys + block * h.dim * BLOCK, BLOCK,
                       weights, BLOCK, false});
      multiply_blocks({rows, BLOCK, h.value_dim, d_out + first * width, width, 1,
                       h.turned_values + block * h.value_dim * BLOCK, BLOCK, gradients, BLOCK, false});
      for (long row = 0; row < rows; ++row)
        score_gradients(h, Seen(h, first + row, block), g.log_sums[first + row], deltas[first + row],
                        weights + row * BLOCK, gradients + row * BLOCK);
      multiply_blocks({BLOCK, width, rows, weights, 1, BLOCK, d_out + first * width, width, g.d_values + key * width,
                       width, true});
      multiply_blocks({BLOCK, dim, rows, gradients, 1, BLOCK, q + first * dim, dim, g.d_keys + key * dim, dim, true});
      multiply_blocks({rows, dim, BLOCK, gradients, BLOCK, 1, h.keys + key * dim, dim, d_q + first * dim, dim, true});
    }
  }
  for (long row = 0; row < h.length; ++row)
    for (long i = 0; i < h.dim; i += W) {
      float* to = g.d_q + row * g.d_q_row + i;
      if (i + W <= h.dim) store(to, load(d_q + row * dim + i));
      else store_first(to, load(d_q + row * dim + i), h.dim - i);
    }
}
