#include "storage/store_record.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "storage/store_sum.h"

const char store_format_key[] = "format";
static const char format_word[] = "keepstep ";

void store_say(char *err, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(err, STORE_ERR_TEXT, format, args);
    va_end(args);
}

int store_key_is_format(const void *key, size_t size)
{
    return size == sizeof store_format_key - 1 && memcmp(key, store_format_key, size) == 0;
}

void store_key_text(const void *key, size_t size, char ret[STORE_KEY_TEXT])
{
    const uint8_t *p = key;
    char *out = ret;
    for (size_t i = 0; i < size && i < STORE_KEY_MAX; i++) {
        if (p[i] > ' ' && p[i] < 127 && p[i] != '%')
            *out++ = (char)p[i];
        else
            out += sprintf(out, "%%%02X", p[i]);
    }
    *out = '\0';
}

static void sum_put(uint8_t *dst, uint32_t sum)
{
    for (int i = 0; i < STORE_HEAD_BYTES; i++)
        dst[i] = (uint8_t)(sum >> (8 * i));
}

static uint32_t sum_get(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

size_t store_value_size(const struct store_op *op)
{
    size_t size = STORE_HEAD_BYTES;
    for (uint32_t i = 0; i < op->nsegments; i++)
        size += op->segment[i].size;
    return size;
}

void store_value_write(const struct store_op *op, uint8_t *dst)
{
    uint32_t sum = 0;
    uint8_t *to = dst + STORE_HEAD_BYTES;
    for (uint32_t i = 0; i < op->nsegments; i++) {
        sum = store_sum_copy(sum, to, op->segment[i].data, op->segment[i].size);
        to += op->segment[i].size;
    }
    sum_put(dst, sum);
}

int store_value_check(const void *value, size_t size, const uint8_t **ret_payload, size_t *ret_size)
{
    const uint8_t *p = value;
    if (size < STORE_HEAD_BYTES)
        return KS_ECORRUPT;
    if (store_sum(0, p + STORE_HEAD_BYTES, size - STORE_HEAD_BYTES) != sum_get(p))
        return KS_ECORRUPT;
    *ret_payload = p + STORE_HEAD_BYTES;
    *ret_size = size - STORE_HEAD_BYTES;
    return 0;
}

size_t store_format_write(uint8_t dst[64])
{
    int n = snprintf((char *)dst + STORE_HEAD_BYTES, 64 - STORE_HEAD_BYTES, "%s%d", format_word, STORE_FORMAT);
    sum_put(dst, store_sum(0, dst + STORE_HEAD_BYTES, (size_t)n));
    return STORE_HEAD_BYTES + (size_t)n;
}

/* A decimal number of up to 9 digits without leading zeros; -1 when it is something else. */
static long number_read(const uint8_t *p, size_t size)
{
    long v = 0;
    if (size == 0 || size > 9 || p[0] == '0')
        return -1;
    for (size_t i = 0; i < size; i++) {
        if (p[i] < '0' || p[i] > '9')
            return -1;
        v = v * 10 + (p[i] - '0');
    }
    return v;
}

int store_format_check(const void *value, size_t size, char *err)
{
    const size_t word = sizeof format_word - 1;
    const uint8_t *text;
    size_t n;
    if (store_value_check(value, size, &text, &n) != 0) {
        store_say(err, "the checksum of its format record is wrong");
        return KS_ECORRUPT;
    }
    long version = n > word && memcmp(text, format_word, word) == 0 ? number_read(text + word, n - word) : -1;
    if (version < 0) {
        store_say(err, "its format record is not Keepstep's");
        return KS_ECORRUPT;
    }
    if (version != STORE_FORMAT) {
        store_say(err, "it has format %ld and this program knows format %d; use the program that wrote it", version,
                  STORE_FORMAT);
        return KS_EVERSION;
    }
    return 0;
}

static void op_check(const struct store_op *op)
{
    CHECK(op->key_size > 0 && op->key_size <= STORE_KEY_MAX);
    CHECK(op->nsegments <= STORE_SEGMENTS_MAX);
    CHECK(!store_key_is_format(op->key, op->key_size));
}

struct store_batch *store_batch_create(uint64_t seq, const struct store_op *ops, size_t n)
{
    struct store_batch *b = mem_alloc(sizeof *b + n * sizeof *ops);
    b->seq = seq;
    b->n = n;
    for (size_t i = 0; i < n; i++) {
        op_check(&ops[i]);
        b->ops[i] = ops[i];
        b->bytes += ops[i].nsegments > 0 ? store_value_size(&ops[i]) : 0;
    }
    return b;
}

void store_batch_list_init(struct store_batch_list *l)
{
    l->first = NULL;
    l->end = &l->first;
    l->count = 0;
}

void store_batch_list_append(struct store_batch_list *l, struct store_batch *b)
{
    b->next = NULL;
    *l->end = b;
    l->end = &b->next;
    l->count++;
}

static struct store_batch *batch_list_pop(struct store_batch_list *l)
{
    struct store_batch *b = l->first;
    l->first = b->next;
    if (l->first == NULL)
        l->end = &l->first;
    l->count--;
    return b;
}

void store_batch_list_take(struct store_batch_list *l, size_t n, size_t bytes, struct store_batch_list *to)
{
    size_t taken = 0;
    for (size_t i = 0; i < n && l->first != NULL && (i == 0 || taken + l->first->bytes <= bytes); i++) {
        taken += l->first->bytes;
        store_batch_list_append(to, batch_list_pop(l));
    }
}

void store_batch_list_free(struct store_batch_list *l)
{
    while (l->first != NULL)
        mem_free(batch_list_pop(l));
}
