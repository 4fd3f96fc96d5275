// Passes over activations in bf16 between matrix products, each once through memory; lab/model/kernels.py calls them.
//
// LANES rows are taken at once, so that their sums cost as many additions as vectors.  A row's result depends on the
// row alone: neither on its place in the tensor, nor on how many rows there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define LANES (__BIGGEST_ALIGNMENT__ / 4)  // numbers per vector: 16 with AVX-512, 8 with AVX2

using bf16 = uint16_t;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

constexpr float LAYERNORM_EPS = 1e-6f, LOG2_E = 1.44269504f;
constexpr float GELU_SLOPE = 1.5957691216057308f, GELU_CUBE = 0.044715f;  // as in layers.py
#if LANES == 16
const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
const ints LANE = {0, 1, 2, 3};
#endif

static inline floats all(float x) { return x - floats{}; }

static inline floats load(const float* from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline floats load(const bf16* from) {
    halves x;
    memcpy(&x, from, sizeof x);
#ifdef __AVX512BF16__
    const bits wide = (bits)_mm512_cvtepu16_epi32((__m256i)x);
#else
    const bits wide = __builtin_convertvector(x, bits);
#endif
    return (floats)(wide << 16);
}

static inline void store(float* to, floats x) { memcpy(to, &x, sizeof x); }

static inline void store(bf16* to, floats x) {  // rounds to nearest, ties to even; NaN stays NaN
#ifdef __AVX512BF16__
    const halves y = (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    const bits exact = (bits)x, rounded = (exact + 0x7fff + ((exact >> 16) & 1)) >> 16;
    const halves y = __builtin_convertvector(x == x ? rounded : bits{} + 0x7fc0, halves);
#endif
    memcpy(to, &y, sizeof y);
}

static inline floats load(const bf16* from, int count, float beyond = 0.0f) {  // ``beyond`` the end
    if (count >= LANES) return load(from);
    bf16 padded[LANES] = {};
    memcpy(padded, from, count * sizeof(bf16));
    return LANE < count ? load(padded) : all(beyond);
}

template <class Number>
static inline void store(Number* to, floats x, int count) {
    if (count >= LANES) return store(to, x);
    Number padded[LANES];
    store(padded, x);
    memcpy(to, padded, count * sizeof(Number));
}

static inline int up_to_lanes(int64_t left) { return left < LANES ? left : LANES; }

// Entries `from_apart` and `to_apart` from row to row.
static void copy_rows(const bf16* from, int from_apart, bf16* to, int to_apart, int rows, int width) {
    for (int i = 0; i < rows; i++) memcpy(to + i * to_apart, from + i * from_apart, width * sizeof(bf16));
}

// Of a block of keys what the i-th query of a block sees: all, or on the diagonal those up to its own.
static inline floats seen_by(int i, bool is_diagonal, floats x, float unseen = 0.0f) {
    return is_diagonal ? (LANE <= i ? x : all(unseen)) : x;
}

static inline floats maximum(floats a, floats b) { return a > b ? a : b; }

// 2^x for x from -126 to 125, and at these ends beyond them, with a relative error of 2e-7; NaN stays NaN.
static inline floats exp2(floats x) {
    const floats low = all(-126.0f), high = all(125.0f), magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds
    x = x < low ? low : x > high ? high : x;
    const floats shifted = x + magic, r = x - (shifted - magic);
    floats p = r * 1.32187e-3f + 9.67170e-3f;  // fitted to 2^r on [-1/2, 1/2]
    p = p * r + 5.550893e-2f;
    p = p * r + 2.4022238e-1f;
    p = p * r + 6.9314686e-1f;
    p = p * r + 1.0f;
    return (floats)((bits)p + ((bits)shifted << 23));
}

static inline floats exp(floats x) { return exp2(x * LOG2_E); }

// 1 / x of a positive normal number; three of Newton's steps are faster than a division.
static inline floats reciprocal(floats x) {
    floats y = (floats)(0x7ef311c7 - (bits)x);
    for (int step = 0; step < 3; step++) y = y * (2.0f - x * y);
    return y;
}

// Sigmoid(2 u) of GELU in its tanh form.
static inline floats gelu_gate(floats x, floats square) {
    const float slope = -LOG2_E * GELU_SLOPE;
    return reciprocal(exp2(x * (square * (slope * GELU_CUBE) + slope)) + 1.0f);
}

// Of LANES vectors, the sum or maximum of each as one vector.
template <class Combine>
static inline floats across(const floats rows[LANES], Combine combine) {
    const ints even = 2 * LANE;
    floats folded[LANES];
    memcpy(folded, rows, sizeof folded);
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++)
            folded[i] = combine(__builtin_shuffle(folded[2 * i], folded[2 * i + 1], even),
                                __builtin_shuffle(folded[2 * i], folded[2 * i + 1], even + 1));
    return folded[0];
}

static inline floats sums(const floats rows[LANES]) {
    return across(rows, [](floats a, floats b) { return a + b; });
}

static inline floats square_root(floats x) {
    float y[LANES];
    store(y, x);
    for (int i = 0; i < LANES; i++) y[i] = std::sqrt(y[i]);  // an array, which compilers take as a vector
    return load(y);
}

// Mean and 1 / deviation of up to LANES rows of `width` entries.
template <class Number>
static inline void moments(const Number* const x[], int rows, int width, floats& mean, floats& scale) {
    floats total[LANES] = {}, square[LANES] = {};
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j += LANES) total[i] += load(x[i] + j);
    mean = sums(total) / float(width);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j += LANES) {
            const floats centred = load(x[i] + j) - mean[i];
            square[i] += centred * centred;
        }
    scale = 1.0f / square_root(sums(square) / float(width) + LAYERNORM_EPS);
}

// The other half of a row of `width` entries that are turned in pairs, at entry j.
template <int width, class Number>
static inline floats partner(const Number* row, int j) {
    if (width == LANES) return __builtin_shuffle(load(row), LANE ^ (LANES / 2));
    return load(row + (j + width / 2) % width);
}

// Rows of one head, `stride` apart, normed, turned and stored `apart` apart; `turns` are cosines [t k], then sines.
template <int width>
static void split_part(const bf16* x, int stride, bf16* y, int apart, const float* gain, const float* turns,
                       int length) {
    for (int t = 0; t < length; t += LANES) {
        const int rows = up_to_lanes(length - t);
        const bf16* from[LANES];
        for (int i = 0; i < rows; i++) from[i] = x + (t + i) * stride;
        floats mean = {}, scale = {};
        if (gain) moments(from, rows, width, mean, scale);
        for (int i = 0; i < rows; i++) {
            float normed[width];
            for (int j = 0; j < width; j += LANES) {
                const floats entry = load(from[i] + j);
                store(normed + j, gain ? (entry - mean[i]) * scale[i] * load(gain + j) : entry);
            }
            const float *cos_k = turns + (t + i) * width, *sin_k = cos_k + length * width;
            for (int j = 0; j < width; j += LANES)
                store(y + (t + i) * apart + j,
                      partner<width>(normed, j) * load(sin_k + j) + load(normed + j) * load(cos_k + j));
        }
    }
}

template <int width>
static void split_part_backward(const bf16* dy, int apart, const bf16* x, bf16* dx, int stride, const float* gain,
                                float* dgain, const float* turns, int length) {
    floats dgain_sum[width / LANES] = {};
    for (int t = 0; t < length; t += LANES) {
        const int rows = up_to_lanes(length - t);
        const bf16* from[LANES];
        float turned[LANES][width], normed[LANES][width];
        floats mean = {}, scale = {}, total[LANES] = {}, product[LANES] = {};
        for (int i = 0; i < rows; i++) from[i] = x + (t + i) * stride;
        if (gain) moments(from, rows, width, mean, scale);
        for (int i = 0; i < rows; i++) {
            const bf16* dy_k = dy + (t + i) * apart;
            const float *cos_k = turns + (t + i) * width, *sin_k = cos_k + length * width;
            for (int j = 0; j < width; j += LANES) {
                floats back = load(dy_k + j) * load(cos_k + j) - partner<width>(dy_k, j) * load(sin_k + j);
                if (gain) {
                    const floats entry = (load(from[i] + j) - mean[i]) * scale[i];
                    dgain_sum[j / LANES] += back * entry;
                    back *= load(gain + j);
                    total[i] += back;
                    product[i] += back * entry;
                    store(normed[i] + j, entry);
                }
                store(turned[i] + j, back);
            }
        }
        if (gain) mean = sums(total) / float(width);
        const floats slope = gain ? sums(product) / float(width) : floats{};
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < width; j += LANES) {
                floats back = load(turned[i] + j);
                if (gain) back = (back - mean[i] - load(normed[i] + j) * slope[i]) * scale[i];
                store(dx + (t + i) * stride + j, back);
            }
    }
    if (gain)
        for (int j = 0; j < width; j += LANES) store(dgain + j, load(dgain + j) + dgain_sum[j / LANES]);
}

template <int width>
static void split_heads_of(const bf16* qkv, bf16* const parts[3], const float* const gains[2],
                           const float* turns, int runs, int batch, int length, int heads) {
    const int stride = 3 * heads * width;
    for (int64_t sequence = 0; sequence < int64_t(runs) * batch; sequence++)
        for (int part = 0; part < 3; part++)
            for (int head = 0; head < heads; head++) {
                const bf16* x = qkv + sequence * length * stride + (part * heads + head) * width;
                bf16* y = parts[part] + (sequence * heads + head) * length * width;
                if (part == 2) {
                    copy_rows(x, stride, y, width, length, width);
                    continue;
                }
                const float* gain = gains[part] ? gains[part] + sequence / batch * width : nullptr;
                split_part<width>(x, stride, y, width, gain, turns + 2 * part * length * width, length);
            }
}

template <int width>
static void split_heads_backward_of(const bf16* const parts[3], const bf16* qkv, bf16* dqkv,
                                    const float* const gains[2], float* const dgains[2],
                                    const float* turns, int runs, int batch, int length, int heads) {
    const int stride = 3 * heads * width;
    for (int64_t sequence = 0; sequence < int64_t(runs) * batch; sequence++)
        for (int part = 0; part < 3; part++)
            for (int head = 0; head < heads; head++) {
                const int64_t start = sequence * length * stride + (part * heads + head) * width;
                const bf16* dy = parts[part] + (sequence * heads + head) * length * width;
                bf16* dx = dqkv + start;
                if (part == 2) {
                    copy_rows(dy, width, dx, stride, length, width);
                    continue;
                }
                const int64_t run = sequence / batch * width;
                split_part_backward<width>(dy, width, qkv + start, dx, stride,
                                           gains[part] ? gains[part] + run : nullptr,
                                           gains[part] ? dgains[part] + run : nullptr,
                                           turns + 2 * part * length * width, length);
            }
}

#ifdef __AMX_BF16__
// Attention of a head at a time, whose scores never leave the cache, by matrix units: tiles of 16 x 16 sums.
//
// A product reads its second factor in pairs of rows: entry [i / 2][j] holds rows i and i + 1 of column j.

constexpr int DEPTH = 32;  // entries of a row that a tile takes
typedef uint32_t pair;

static inline bits load(const pair* from) {
    bits x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(pair* to, bits x) { memcpy(to, &x, sizeof x); }

static inline int round_up(int number, int unit) { return (number + unit - 1) / unit * unit; }

static inline floats rounded(floats x) {
    bf16 y[LANES];
    store(y, x);
    return load(y);
}

// Pairs of rows of [rows columns].
static void pair_rows(const bf16* x, int rows, int columns, pair* y) {
    for (int i = 0; i < rows; i += 2)
        for (int j = 0; j < columns; j += LANES) {
            const bits first = (bits)load(x + i * columns + j) >> 16, second = (bits)load(x + (i + 1) * columns + j);
            store(y + i / 2 * columns + j, first | second);
        }
}

// [rows columns] to [columns rows]: of rows of pairs, the pairs of rows of the transposed matrix, and the reverse.
static void transpose(const pair* x, int rows, int columns, pair* y) {
    for (int i = 0; i < rows; i += LANES)
        for (int j = 0; j < columns; j += LANES) {
            bits row[LANES];
            for (int k = 0; k < LANES; k++) row[k] = load(x + (i + k) * columns + j);
            for (int step = 1; step < LANES; step *= 2) {
                const ints low = (LANE & step) ? LANE - step + LANES : LANE, high = low + step;
                for (int k = 0; k < LANES; k++)
                    if (!(k & step)) {
                        const bits a = row[k], b = row[k + step];
                        row[k] = __builtin_shuffle(a, b, low);
                        row[k + step] = __builtin_shuffle(a, b, high);
                    }
            }
            for (int k = 0; k < LANES; k++) store(y + (j + k) * rows + i, row[k]);
        }
}

// c [rows columns] = a [rows depth] b, with rows of a, pairs of b and rows of c so many entries apart.
static void multiply(const bf16* a, int a_apart, const pair* b, int b_apart, float* c, int c_apart, int rows,
                     int columns, int depth) {
    asm volatile("" ::: "memory");  // the tiles' instructions do not say that they read it
    for (int i = 0; i < rows; i += LANES)
        for (int j = 0; j < columns; j += LANES) {
            _tile_zero(0);
            for (int k = 0; k < depth; k += DEPTH) {
                _tile_loadd(1, a + i * a_apart + k, a_apart * sizeof(bf16));
                _tile_loadd(2, b + k / 2 * b_apart + j, b_apart * sizeof(pair));
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, c + i * c_apart + j, c_apart * sizeof(float));
        }
    asm volatile("" ::: "memory");
}

// The shape of tiles while it lives: torch's library may have left another, on which it relies.
struct Tiles {
    struct alignas(64) Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64};
        uint8_t rows[16] = {16, 16, 16};
    } before;
    Tiles() {
        const Shape ours;
        _tile_storeconfig(&before);
        asm volatile("" : : "r"(&ours), "r"(&before) : "memory");
        _tile_loadconfig(&ours);
    }
    ~Tiles() {
        asm volatile("" : : "r"(&before) : "memory");
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
};

// What a head needs, padded with zeros to whole tiles: rows of q, k, v and the gradients, their pairs, and weights.
template <int head_width>
struct Head {
    static constexpr int width = head_width < DEPTH ? DEPTH : head_width;
    int length, padded;
    std::vector<bf16> q, k, v, back, weights, dscores, transposed;
    std::vector<pair> k_across, v_across, q_pairs, k_pairs, v_pairs, back_pairs, pairs;
    std::vector<float> scores, dweights, sums_of_rows;

    explicit Head(int length) : length(length), padded(round_up(length, DEPTH)) {
        const int rows = padded * width, square = padded * padded;
        for (auto* each : {&q, &k, &v, &back}) each->resize(rows);
        for (auto* each : {&weights, &dscores, &transposed}) each->resize(square);
        for (auto* each : {&k_across, &v_across, &q_pairs, &k_pairs, &v_pairs, &back_pairs}) each->resize(rows / 2);
        pairs.resize(square / 2);
        for (auto* each : {&scores, &dweights}) each->resize(LANES * padded);
        sums_of_rows.resize(rows);
    }

    void split(const bf16* qkv, int stride, int part_apart, const float* const gains[2], const float* turns) {
        if (padded > length || width > head_width)  // another run's may be NaN
            for (auto* each : {&q, &k, &v, &back}) std::fill(each->begin(), each->end(), 0);
        split_part<head_width>(qkv, stride, q.data(), width, gains[0], turns, length);
        split_part<head_width>(qkv + part_apart, stride, k.data(), width, gains[1], turns + 2 * length * head_width,
                               length);
        copy_rows(qkv + 2 * part_apart, stride, v.data(), width, length, head_width);
        transpose((const pair*)k.data(), padded, width / 2, k_across.data());
    }

    // Scores of sixteen queries from the t-th on, rounded, with those of later keys left out.
    floats score(int t, int i, int j) const {
        return seen_by(i, j == t, rounded(load(scores.data() + i * padded + j)), -INFINITY);
    }

    void forward(bf16* mixed, int stride, float* kept) {
        pair_rows(v.data(), padded, width, v_pairs.data());
        for (int t = 0; t < length; t += LANES) {
            const int rows = up_to_lanes(length - t), seen = round_up(t + LANES, DEPTH);
            multiply(q.data() + t * width, width, k_across.data(), padded, scores.data(), padded, LANES, t + LANES,
                     width);
            floats largest[LANES], total[LANES] = {};
            for (int i = 0; i < LANES; i++) {
                largest[i] = score(t, i, t);
                for (int j = 0; j < t; j += LANES) largest[i] = maximum(score(t, i, j), largest[i]);
            }
            const floats most = across(largest, maximum);
            for (int i = 0; i < LANES; i++)
                for (int j = 0; j <= t; j += LANES) {
                    const floats each = seen_by(i, j == t, exp(score(t, i, j) - most[i]));
                    store(scores.data() + i * padded + j, each);
                    total[i] += each;
                }
            const floats scale = 1.0f / sums(total);
            for (int i = 0; i < LANES; i++)
                for (int j = 0; j < seen; j += LANES)
                    store(weights.data() + i * padded + j,
                          j <= t ? load(scores.data() + i * padded + j) * scale[i] : floats{});
            multiply(weights.data(), padded, v_pairs.data(), width, sums_of_rows.data(), width, LANES, width, seen);
            for (int i = 0; i < rows; i++) {
                for (int j = 0; j < head_width; j += LANES)
                    store(mixed + (t + i) * stride + j, load(sums_of_rows.data() + i * width + j));
                kept[2 * (t + i)] = most[i];
                kept[2 * (t + i) + 1] = scale[i];
            }
        }
    }

    // Weights and gradients of scores of all rows; `back` becomes the gradient of queries.
    void backward_of_scores(const float* kept) {
        transpose((const pair*)v.data(), padded, width / 2, v_across.data());
        pair_rows(k.data(), padded, width, k_pairs.data());
        pair_rows(back.data(), padded, width, back_pairs.data());
        for (int t = 0; t < padded; t += LANES) {
            const int columns = t + LANES, seen = round_up(columns, DEPTH);
            multiply(q.data() + t * width, width, k_across.data(), padded, scores.data(), padded, LANES, columns,
                     width);
            multiply(back.data() + t * width, width, v_across.data(), padded, dweights.data(), padded, LANES, columns,
                     width);
            floats product[LANES] = {};
            for (int i = 0; i < LANES; i++) {
                const bool is_row = t + i < length;
                const float most = is_row ? kept[2 * (t + i)] : 0.0f, scale = is_row ? kept[2 * (t + i) + 1] : 0.0f;
                for (int j = 0; j <= t; j += LANES) {
                    const floats p = seen_by(i, j == t, exp(score(t, i, j) - most) * scale);
                    store(scores.data() + i * padded + j, p);
                    product[i] += p * rounded(load(dweights.data() + i * padded + j));
                }
            }
            const floats mean = sums(product);
            for (int i = 0; i < LANES; i++)
                for (int j = 0; j < padded; j += LANES) {
                    const int64_t at = (t + i) * padded + j;
                    const floats p = j <= t ? load(scores.data() + i * padded + j) : floats{};
                    store(weights.data() + at, p);
                    store(dscores.data() + at,
                          j <= t ? p * (rounded(load(dweights.data() + i * padded + j)) - mean[i]) : floats{});
                }
            multiply(dscores.data() + t * padded, padded, k_pairs.data(), width, sums_of_rows.data(), width, LANES,
                     width, seen);
            round_rows(sums_of_rows.data(), back.data() + t * width, LANES);
        }
    }

    void round_rows(const float* from, bf16* to, int rows) const {
        for (int i = 0; i < rows * width; i += LANES) store(to + i, load(from + i));
    }

    // The transposed matrix [padded padded] times pairs of rows, into rows of bf16.
    void multiply_transposed(const std::vector<bf16>& matrix, const std::vector<pair>& factor, bf16* product) {
        pair_rows(matrix.data(), padded, padded, pairs.data());
        transpose(pairs.data(), padded / 2, padded, (pair*)transposed.data());
        for (int s = 0; s < padded; s += LANES) {
            const int first = s / DEPTH * DEPTH;  // earlier queries do not see these keys
            multiply(transposed.data() + s * padded + first, padded, factor.data() + first / 2 * width, width,
                     sums_of_rows.data() + s * width, width, LANES, width, padded - first);
        }
        round_rows(sums_of_rows.data(), product, padded);
    }
};

// Fetch a sequence into the cache, line by line: one head's rows are too far apart for the processor to foresee.
static void fetch(const bf16* from, int64_t entries, bool to_write = false) {
    for (int64_t i = 0; i < entries; i += 64 / sizeof(bf16)) {
        if (to_write) __builtin_prefetch(from + i, 1, 2);
        else __builtin_prefetch(from + i, 0, 2);
    }
}

template <int width>
static void attention_of(const bf16* qkv, bf16* mixed, float* kept, const float* const gains[2],
                         const float* turns, int runs, int batch, int length, int heads) {
    const Tiles tiles;
    Head<width> head(length);
    const int inner = heads * width;
    for (int64_t sequence = 0; sequence < int64_t(runs) * batch; sequence++) {
        const int64_t run = sequence / batch * width;
        const float* const own[2] = {gains[0] ? gains[0] + run : nullptr, gains[1] ? gains[1] + run : nullptr};
        fetch(qkv + sequence * length * 3 * inner, length * 3 * inner);
        for (int i = 0; i < heads; i++) {
            head.split(qkv + sequence * length * 3 * inner + i * width, 3 * inner, inner, own, turns);
            head.forward(mixed + sequence * length * inner + i * width, inner,
                         kept + 2 * (sequence * heads + i) * length);
        }
    }
}

template <int width>
static void attention_backward_of(const bf16* dmixed, const bf16* qkv, const float* kept, bf16* dqkv,
                                  const float* const gains[2], float* const dgains[2], const float* turns,
                                  int runs, int batch, int length, int heads) {
    const Tiles tiles;
    Head<width> head(length);
    const int inner = heads * width, stride = 3 * inner;
    for (int64_t sequence = 0; sequence < int64_t(runs) * batch; sequence++) {
        const int64_t run = sequence / batch * width;
        const float* const own[2] = {gains[0] ? gains[0] + run : nullptr, gains[1] ? gains[1] + run : nullptr};
        fetch(qkv + sequence * length * stride, length * stride);
        fetch(dmixed + sequence * length * inner, length * inner);
        fetch(dqkv + sequence * length * stride, length * stride, true);
        for (int i = 0; i < heads; i++) {
            const int64_t start = sequence * length * stride + i * width;
            head.split(qkv + start, stride, inner, own, turns);
            copy_rows(dmixed + sequence * length * inner + i * width, inner, head.back.data(), head.width, length,
                      width);
            head.backward_of_scores(kept + 2 * (sequence * heads + i) * length);
            pair_rows(head.q.data(), head.padded, head.width, head.q_pairs.data());
            head.multiply_transposed(head.dscores, head.q_pairs, head.k.data());
            head.multiply_transposed(head.weights, head.back_pairs, head.v.data());
            const bf16* const dparts[2] = {head.back.data(), head.k.data()};
            for (int part = 0; part < 2; part++)
                split_part_backward<width>(dparts[part], head.width, qkv + start + part * inner,
                                           dqkv + start + part * inner, stride, own[part],
                                           own[part] ? dgains[part] + run : nullptr, turns + 2 * part * length * width,
                                           length);
            copy_rows(head.v.data(), head.width, dqkv + start + 2 * inner, stride, length, width);
        }
    }
}
#endif

// Call a function with the width of a head as a constant.
template <class Function>
static void for_width(int64_t width, Function call) {
    switch (width) {
        case 16: return call(std::integral_constant<int, 16>());
        case 32: return call(std::integral_constant<int, 32>());
        case 64: return call(std::integral_constant<int, 64>());
        case 128: return call(std::integral_constant<int, 128>());
    }
}

extern "C" {

void split_heads(const bf16* qkv, bf16* q, bf16* k, bf16* v, const float* q_gain, const float* k_gain,
                 const float* turns, int64_t runs, int64_t batch, int64_t length, int64_t heads, int64_t width) {
    bf16* const parts[3] = {q, k, v};
    const float* const gains[2] = {q_gain, k_gain};
    for_width(width, [&](auto constant) {
        split_heads_of<constant>(qkv, parts, gains, turns, runs, batch, length, heads);
    });
}

void split_heads_backward(const bf16* dq, const bf16* dk, const bf16* dv, const bf16* qkv, bf16* dqkv,
                          const float* q_gain, const float* k_gain, float* dq_gain, float* dk_gain,
                          const float* turns, int64_t runs, int64_t batch, int64_t length, int64_t heads,
                          int64_t width) {
    const bf16* const parts[3] = {dq, dk, dv};
    const float* const gains[2] = {q_gain, k_gain};
    float* const dgains[2] = {dq_gain, dk_gain};
    for_width(width, [&](auto constant) {
        split_heads_backward_of<constant>(parts, qkv, dqkv, gains, dgains, turns, runs, batch, length, heads);
    });
}

#ifdef __AMX_BF16__
int multiplies_tiles() { return !syscall(SYS_arch_prctl, 0x1023, 18); }  // asks the system for the tiles' registers

void attention(const bf16* qkv, bf16* mixed, float* kept, const float* q_gain, const float* k_gain,
               const float* turns, int64_t runs, int64_t batch, int64_t length, int64_t heads, int64_t width) {
    const float* const gains[2] = {q_gain, k_gain};
    for_width(width, [&](auto constant) {
        attention_of<constant>(qkv, mixed, kept, gains, turns, runs, batch, length, heads);
    });
}

void attention_backward(const bf16* dmixed, const bf16* qkv, const float* kept, bf16* dqkv, const float* q_gain,
                        const float* k_gain, float* dq_gain, float* dk_gain, const float* turns, int64_t runs,
                        int64_t batch, int64_t length, int64_t heads, int64_t width) {
    const float* const gains[2] = {q_gain, k_gain};
    float* const dgains[2] = {dq_gain, dk_gain};
    for_width(width, [&](auto constant) {
        attention_backward_of<constant>(dmixed, qkv, kept, dqkv, gains, dgains, turns, runs, batch, length, heads);
    });
}
#else
int multiplies_tiles() { return 0; }
#endif

// Of each row the largest score and the factor of exponentials are kept for the way back.
void causal_softmax(const bf16* scores, bf16* weights, float* kept, int64_t matrices, int64_t length) {
    const int columns = (length + LANES - 1) / LANES;
    std::vector<floats> exps(columns * LANES);
    for (int64_t matrix = 0; matrix < matrices; matrix++)
        for (int t = 0; t < length; t += LANES) {
            const int rows = up_to_lanes(length - t), last = t / LANES;
            const bf16* x = scores + (matrix * length + t) * length;
            bf16* y = weights + (matrix * length + t) * length;
            floats largest[LANES], total[LANES] = {};
            for (int i = 0; i < rows; i++) {
                largest[i] = seen_by(i, true, load(x + i * length + t, length - t), -INFINITY);
                for (int j = 0; j < last; j++) largest[i] = maximum(load(x + i * length + j * LANES), largest[i]);
            }
            const floats most = across(largest, maximum);
            for (int i = 0; i < rows; i++) {
                const floats diagonal = exp(load(x + i * length + t, length - t) - most[i]);
                total[i] = exps[i * columns + last] = seen_by(i, true, diagonal);
                for (int j = 0; j < last; j++) {
                    exps[i * columns + j] = exp(load(x + i * length + j * LANES) - most[i]);
                    total[i] += exps[i * columns + j];
                }
            }
            const floats scale = 1.0f / sums(total);
            for (int i = 0; i < rows; i++) {
                for (int j = 0; j < columns; j++)
                    store(y + i * length + j * LANES, j <= last ? exps[i * columns + j] * scale[i] : floats{},
                          length - j * LANES);
                kept[2 * (matrix * length + t + i)] = most[i];
                kept[2 * (matrix * length + t + i) + 1] = scale[i];
            }
        }
}

void causal_softmax_backward(const bf16* dweights, const bf16* scores, const float* kept, bf16* dscores,
                             int64_t matrices, int64_t length) {
    const int columns = (length + LANES - 1) / LANES;
    std::vector<floats> weights(columns * LANES);
    for (int64_t matrix = 0; matrix < matrices; matrix++)
        for (int t = 0; t < length; t += LANES) {
            const int rows = up_to_lanes(length - t), last = t / LANES;
            const int64_t start = (matrix * length + t) * length;
            floats product[LANES] = {};
            for (int i = 0; i < rows; i++) {
                const float *of_row = kept + 2 * (matrix * length + t + i), most = of_row[0], scale = of_row[1];
                for (int j = 0; j <= last; j++) {
                    const int64_t at = start + i * length + j * LANES;
                    const int count = length - j * LANES;
                    const floats p = exp(load(scores + at, count) - most) * scale;
                    weights[i * columns + j] = seen_by(i, j == last, p);
                    product[i] += seen_by(i, j == last, p * load(dweights + at, count));  // the unseen may be NaN
                }
            }
            const floats mean = sums(product);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < columns; j++) {
                    const int64_t at = start + i * length + j * LANES;
                    const int count = length - j * LANES;
                    floats back = {};
                    if (j <= last)
                        back = seen_by(i, j == last, weights[i * columns + j] * (load(dweights + at, count) - mean[i]));
                    store(dscores + at, back, count);
                }
        }
}

void gelu(const bf16* x, bf16* y, int64_t entries) {
    for (int64_t i = 0; i < entries; i += LANES) {
        const int count = up_to_lanes(entries - i);
        const floats entry = load(x + i, count);
        store(y + i, entry * gelu_gate(entry, entry * entry), count);
    }
}

void gelu_backward(const bf16* dy, const bf16* x, bf16* dx, int64_t entries) {
    for (int64_t i = 0; i < entries; i += LANES) {
        const int count = up_to_lanes(entries - i);
        const floats entry = load(x + i, count), square = entry * entry, gate = gelu_gate(entry, square);
        const floats bend = entry * (square * (3 * GELU_SLOPE * GELU_CUBE) + GELU_SLOPE);
        store(dx + i, load(dy + i, count) * (gate + bend * (gate - gate * gate)), count);
    }
}

void layer_norm(const float* x, bf16* y, const float* gain, int64_t runs, int64_t tokens, int64_t width) {
    for (int64_t row = 0; row < runs * tokens; row += LANES) {
        const int rows = up_to_lanes(runs * tokens - row);
        const float* from[LANES];
        for (int i = 0; i < rows; i++) from[i] = x + (row + i) * width;
        floats mean, scale;
        moments(from, rows, width, mean, scale);
        for (int i = 0; i < rows; i++) {
            const float* gain_d = gain + (row + i) / tokens * width;
            for (int j = 0; j < width; j += LANES)
                store(y + (row + i) * width + j, (load(from[i] + j) - mean[i]) * scale[i] * load(gain_d + j));
        }
    }
}

void layer_norm_backward(const bf16* dy, const float* x, const float* gain, float* dx, float* dgain, int64_t runs,
                         int64_t tokens, int64_t width) {
    for (int run = 0; run < runs; run++) {
        const float* gain_d = gain + int64_t(run) * width;
        float* dgain_d = dgain + int64_t(run) * width;
        for (int64_t token = 0; token < tokens; token += LANES) {
            const int rows = up_to_lanes(tokens - token);
            const int64_t row = run * tokens + token;
            const float* from[LANES];
            for (int i = 0; i < rows; i++) from[i] = x + (row + i) * width;
            floats mean, scale, total[LANES] = {}, product[LANES] = {};
            moments(from, rows, width, mean, scale);
            for (int j = 0; j < width; j += LANES) {
                floats dgain_sum = {};
                for (int i = 0; i < rows; i++) {
                    const floats entry = (load(from[i] + j) - mean[i]) * scale[i];
                    floats back = load(dy + (row + i) * width + j);
                    dgain_sum += back * entry;
                    back *= load(gain_d + j);
                    total[i] += back;
                    product[i] += back * entry;
                }
                store(dgain_d + j, load(dgain_d + j) + dgain_sum);
            }
            const floats shift = sums(total) / float(width), slope = sums(product) / float(width);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < width; j += LANES) {
                    const floats entry = (load(from[i] + j) - mean[i]) * scale[i];
                    const floats back = load(dy + (row + i) * width + j) * load(gain_d + j);
                    store(dx + (row + i) * width + j, (back - shift[i] - entry * slope[i]) * scale[i]);
                }
        }
    }
}

// Log of the sum of exponentials of up to LANES rows.
static floats log_sum_exp(const bf16* x, int rows, int width) {
    floats largest[LANES], total[LANES] = {};
    for (int i = 0; i < rows; i++) {
        largest[i] = all(-INFINITY);
        for (int j = 0; j < width; j += LANES)
            largest[i] = maximum(load(x + i * width + j, width - j, -INFINITY), largest[i]);
    }
    floats log_z = across(largest, maximum);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j += LANES)
            total[i] += exp(load(x + i * width + j, width - j, -INFINITY) - log_z[i]);
    const floats sum = sums(total);
    for (int i = 0; i < rows; i++) log_z[i] += std::log(sum[i]);
    return log_z;
}

void token_loss(const bf16* logits, const int64_t* targets, float* loss, float* log_z, int64_t tokens, int64_t width) {
    for (int64_t token = 0; token < tokens; token += LANES) {
        const int rows = up_to_lanes(tokens - token);
        const floats log_sum = log_sum_exp(logits + token * width, rows, width);
        store(log_z + token, log_sum, rows);
        for (int i = 0; i < rows; i++) {
            const int64_t target = targets[token + i] < 0 ? 0 : targets[token + i];
            loss[token + i] = log_sum[i] - load(logits + (token + i) * width + target, 1)[0];
        }
    }
}

void token_loss_backward(const float* dloss, const float* dlog_z, const bf16* logits, const int64_t* targets,
                         const float* log_z, bf16* dlogits, int64_t tokens, int64_t width) {
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t target = targets[token];
        const bf16* x = logits + token * width;
        bf16* dx = dlogits + token * width;
        if (target < 0) {
            memset(dx, 0, width * sizeof(bf16));
            continue;
        }
        const float scale = dloss[token] + dlog_z[token];
        for (int j = 0; j < width; j += LANES) {
            floats back = exp(load(x + j, width - j) - log_z[token]) * scale;
            if (target / LANES == j / LANES) back -= LANE == int(target - j) ? all(dloss[token]) : floats{};
            store(dx + j, back, width - j);
        }
    }
}
}
