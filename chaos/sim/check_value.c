/* check_value.c - what a value is made of, and which pushes explain it. */
#include "chaos/sim/sim.h"

#include <string.h>
#include "base/mem.h"

enum { COUNTERS = 5, COUNTER_BITS = 12, COUNTER_ELEMENTS = 4, FLOATS = SIM_CHUNK_BYTES / 4 };

static uint64_t draw(const struct world *w, uint64_t a, uint64_t b, uint64_t c)
{
    return hash_mix(hash_mix(hash_mix(w->opt.seed * 77 + a) + b) + c);
}

uint32_t chunk_elements(const struct world *w, uint32_t tensor, uint32_t chunk)
{
    const struct tensor_spec *s = &w->cfg.tensor[tensor].spec;
    return tensor_chunk_bytes(s, chunk, SIM_CHUNK_BYTES) / (uint32_t)dtype_size(s->dtype);
}

static int64_t initial_of(const struct world *w, uint32_t tensor, uint32_t chunk)
{
    return w->cfg.tensor[tensor].spec.kind == TENSOR_PARAM ? (int64_t)(draw(w, 1000 + tensor, chunk, 9) >> 24) : 0;
}

static int64_t push_of(const struct world *w, uint32_t member, uint32_t tensor, uint32_t chunk, uint32_t seq)
{
    return (int64_t)(draw(w, member * 8 + tensor, chunk, seq) >> 24);
}

static int64_t element(int64_t base, uint32_t e)
{
    return e == 0 ? base : base * (int64_t)e;
}

static float initial_float(const struct world *w, uint32_t tensor, uint32_t chunk, uint32_t e)
{
    return (float)(int32_t)(draw(w, 2000 + tensor, chunk, e) >> 40) / 1e6f;
}

static float push_float(const struct world *w, uint32_t member, uint32_t tensor, uint32_t chunk, uint32_t e, int64_t step)
{
    return ((float)(int32_t)(draw(w, member * 8 + tensor, chunk * FLOATS + e, (uint64_t)step) >> 40) - 8e6f) / 1e7f;
}

void value_initial(const struct world *w, uint32_t tensor, uint8_t *out)
{
    const struct sim_tensor *t = &w->cfg.tensor[tensor];
    for (uint32_t c = 0; c < t->nchunks; c++) {
        uint8_t *at = out + (size_t)c * SIM_CHUNK_BYTES;
        for (uint32_t e = 0; e < chunk_elements(w, tensor, c); e++) {
            int64_t v = e >= 1 && e <= COUNTER_ELEMENTS ? 0 : element(initial_of(w, tensor, c), e);
            float f = initial_float(w, tensor, c, e);
            memcpy(at + e * dtype_size(t->spec.dtype), w->cfg.floats ? (void *)&f : (void *)&v,
                   dtype_size(t->spec.dtype));
        }
    }
}

static int64_t count_of(uint32_t member, uint32_t e, int64_t n)
{
    return member / COUNTERS == e - 1 ? n << (member % COUNTERS * COUNTER_BITS) : 0;
}

void value_push(const struct world *w, uint32_t member, uint32_t tensor, uint32_t seq, int64_t step, uint8_t *out)
{
    const struct sim_tensor *t = &w->cfg.tensor[tensor];
    for (uint32_t c = 0; c < t->nchunks; c++) {
        uint8_t *at = out + (size_t)c * SIM_CHUNK_BYTES;
        int64_t base = push_of(w, member, tensor, c, seq);
        for (uint32_t e = 0; e < chunk_elements(w, tensor, c); e++) {
            int64_t v = e >= 1 && e <= COUNTER_ELEMENTS ? count_of(member, e, 1) : element(base, e);
            float f = push_float(w, member, tensor, c, e, step);
            memcpy(at + e * dtype_size(t->spec.dtype), w->cfg.floats ? (void *)&f : (void *)&v,
                   dtype_size(t->spec.dtype));
        }
    }
}

/* ---- the record of pushes ---- */

void history_pushed(struct world *w, uint32_t member, uint32_t tensor, int64_t step)
{
    struct known_member *m = &w->history.member[member];
    const struct sim_tensor *t = &w->cfg.tensor[tensor];
    uint32_t n = m->pushed[tensor]++;
    if (n == m->stamp_cap[tensor]) {
        uint32_t cap = m->stamp_cap[tensor] = n ? 2 * n : 32;
        m->stamp[tensor] = mem_resize(m->stamp[tensor], cap * sizeof(int64_t));
        for (uint32_t c = 0; c < t->nchunks; c++)
            m->sum[t->first + c] = mem_resize(m->sum[t->first + c], (cap + 1) * sizeof(int64_t));
    }
    m->stamp[tensor][n] = step;
    for (uint32_t c = 0; c < t->nchunks; c++) {
        int64_t *sum = m->sum[t->first + c];
        sum[0] = 0;
        sum[n + 1] = sum[n] + push_of(w, member, tensor, c, n + 1);
    }
}

uint32_t pushes_until(const struct world *w, uint32_t member, uint32_t tensor, int64_t step)
{
    const struct known_member *m = &w->history.member[member];
    uint32_t n = m->pushed[tensor];
    while (n && m->stamp[tensor][n - 1] > step)
        n--;
    return n;
}

static int64_t get(const uint8_t *bytes, uint32_t e)
{
    int64_t v;
    memcpy(&v, bytes + e * sizeof v, sizeof v);
    return v;
}

static bool counts_read(const struct world *w, const uint8_t *bytes, uint32_t tensor, uint32_t *ret_counts)
{
    memset(ret_counts, 0, SIM_MEMBERS_MAX * sizeof *ret_counts);
    for (uint32_t m = 0; m < SIM_MEMBERS_MAX; m++) {
        uint64_t v = (uint64_t)get(bytes, 1 + m / COUNTERS);
        ret_counts[m] = (uint32_t)(v >> (m % COUNTERS * COUNTER_BITS)) & ((1u << COUNTER_BITS) - 1);
        if (ret_counts[m] > (m < w->nmembers ? w->history.member[m].pushed[tensor] : 0))
            return false;
    }
    return true;
}

bool value_explain(struct world *w, const char *who, uint32_t tensor, uint32_t chunk, const uint8_t *bytes,
                   uint32_t *ret_counts)
{
    uint32_t global = w->cfg.tensor[tensor].first + chunk;
    int64_t sum = initial_of(w, tensor, chunk);
    bool explained = counts_read(w, bytes, tensor, ret_counts);
    for (uint32_t m = 0; explained && m < w->nmembers; m++)
        if (ret_counts[m])
            sum += w->history.member[m].sum[global][ret_counts[m]];
    for (uint32_t e = 0; explained && e < chunk_elements(w, tensor, chunk); e++)
        if ((e == 0 || e > COUNTER_ELEMENTS) && get(bytes, e) != element(sum, e))
            explained = false;
    if (!explained)
        world_fail(w, "I3 %s: no pushes explain tensor %u chunk %u (counts of m0..: %u %u %u %u %u %u %u %u)", who, tensor,
                   chunk, ret_counts[0], ret_counts[1], ret_counts[2], ret_counts[3], ret_counts[4], ret_counts[5],
                   ret_counts[6], ret_counts[7]);
    return explained;
}

void value_step_sum(const struct world *w, uint32_t tensor, uint32_t chunk, int64_t step, uint32_t set, uint8_t *out)
{
    uint32_t n = chunk_elements(w, tensor, chunk);
    int64_t v[SIM_CHUNK_BYTES / 8] = { 0 };
    for (uint32_t m = 0; m < w->nmembers; m++) {
        uint32_t from = pushes_until(w, m, tensor, step - 1), to = pushes_until(w, m, tensor, step);
        if (!(set >> m & 1))
            continue;
        for (uint32_t q = from + 1; q <= to; q++)
            for (uint32_t e = 0; e < n; e++)
                v[e] += e >= 1 && e <= COUNTER_ELEMENTS ? count_of(m, e, 1) : element(push_of(w, m, tensor, chunk, q), e);
    }
    memcpy(out, v, n * sizeof *v);
}

/* ---- floats: the ordered reference (I10) ---- */

static void reference_chunk(struct world *w, uint32_t tensor, uint32_t chunk, int64_t step, float *value)
{
    uint32_t set = w->history.set[step], n = chunk_elements(w, tensor, chunk), who = 0;
    float sum[FLOATS];
    for (uint32_t m = 0; m < w->nmembers; m++) {
        if (!(set >> m & 1) || pushes_until(w, m, tensor, step) == pushes_until(w, m, tensor, step - 1))
            continue;
        for (uint32_t e = 0; e < n; e++) {
            float g = push_float(w, m, tensor, chunk, e, step);
            sum[e] = who ? sum[e] + g : g;
        }
        who++;
    }
    for (uint32_t e = 0; who && e < n; e++)
        value[e] = value[e] + (float)-w->history.rate[step] * sum[e];
}

static double rate_after(const struct world *w, int64_t step)
{
    for (uint32_t m = w->nmembers; m-- > 0;)
        if (w->history.set[step] >> m & 1 && app_rate(w, m, step) != 0)
            return app_rate(w, m, step);
    return w->history.rate[step];
}

const float *history_reference(struct world *w, int64_t step)
{
    struct history *h = &w->history;
    while (h->references < step) {
        int64_t k = ++h->references;
        float *v = h->reference[k] = mem_alloc(SIM_CHUNKS_MAX * FLOATS * sizeof *v);
        h->rate[k] = k ? rate_after(w, k - 1) : 0.25;
        for (uint32_t t = 0; t < w->cfg.ntensors; t++)
            for (uint32_t c = 0; c < w->cfg.tensor[t].nchunks; c++) {
                float *at = v + (w->cfg.tensor[t].first + c) * FLOATS;
                for (uint32_t e = 0; e < chunk_elements(w, t, c); e++)
                    at[e] = k ? h->reference[k - 1][at - v + e] : initial_float(w, t, c, e);
                reference_chunk(w, t, c, k, at);
            }
    }
    return h->reference[step];
}
