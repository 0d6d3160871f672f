#include "wire/doc_json.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"

/* ---- writing ---- */

static void put_raw(struct doc_writer *w, const char *s, size_t n)
{
    if (w->cap - w->len < n + 1) {
        w->cap = (w->len + n + 1) * 2;
        w->text = mem_resize(w->text, w->cap);
    }
    memcpy(w->text + w->len, s, n);
    w->len += n;
}

static void put_quoted(struct doc_writer *w, const char *s)
{
    put_raw(w, "\"", 1);
    for (; *s; s++) {
        char escaped[8];
        if (*s == '"' || *s == '\\')
            put_raw(w, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\%c", *s));
        else if ((unsigned char)*s < 0x20)
            put_raw(w, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)*s));
        else
            put_raw(w, s, 1);
    }
    put_raw(w, "\"", 1);
}

static void put_key(struct doc_writer *w, const char *key)
{
    if (w->comma)
        put_raw(w, ",", 1);
    w->comma = true;
    if (key) {
        put_quoted(w, key);
        put_raw(w, ":", 1);
    }
}

void doc_put_open(struct doc_writer *w, const char *key, char bracket)
{
    put_key(w, key);
    put_raw(w, &bracket, 1);
    w->comma = false;
}

void doc_put_close(struct doc_writer *w, char bracket)
{
    put_raw(w, &bracket, 1);
    w->comma = true;
}

void doc_put_text(struct doc_writer *w, const char *key, const char *s)
{
    put_key(w, key);
    put_quoted(w, s);
}

void doc_put_id(struct doc_writer *w, const char *key, uint64_t x)
{
    char number[24];
    snprintf(number, sizeof number, "%" PRIu64, x);
    doc_put_text(w, key, number);
}

void doc_put_step(struct doc_writer *w, const char *key, int64_t step)
{
    char number[24];
    snprintf(number, sizeof number, "%" PRId64, step);
    doc_put_text(w, key, step == STEP_NONE ? "none" : number);
}

void doc_put_number(struct doc_writer *w, const char *key, uint32_t x)
{
    char number[16];
    put_key(w, key);
    put_raw(w, number, (size_t)snprintf(number, sizeof number, "%" PRIu32, x));
}

void doc_put_word(struct doc_writer *w, const char *key, const char *const *words, uint32_t count, uint32_t index)
{
    CHECK(index < count);
    doc_put_text(w, key, words[index]);
}

void doc_put_bool(struct doc_writer *w, const char *key, bool x)
{
    put_key(w, key);
    put_raw(w, x ? "true" : "false", x ? 4 : 5);
}

void doc_put_bytes(struct doc_writer *w, const char *key, const uint8_t *p, size_t size)
{
    put_key(w, key);
    put_raw(w, "\"", 1);
    for (size_t i = 0; i < size; i++) {
        char hex[3];
        snprintf(hex, sizeof hex, "%02x", p[i]);
        put_raw(w, hex, 2);
    }
    put_raw(w, "\"", 1);
}

char *doc_put_done(struct doc_writer *w)
{
    put_raw(w, "", 0);
    w->text[w->len] = 0;
    return w->text;
}

/* ---- reading ---- */

void doc_fail(const struct doc_node *n, const char *key, const char *format, ...)
{
    struct doc_reader *r = n->reader;
    va_list args;
    if (r->rc)
        return;
    r->rc = KS_EPROTO;
    int used = snprintf(r->err, ERR_TEXT, "%s%s%s: ", n->path, key ? "." : "", key ? key : "");
    if (used < 0 || used >= ERR_TEXT)
        return;
    va_start(args, format);
    vsnprintf(r->err + used, ERR_TEXT - (size_t)used, format, args);
    va_end(args);
}

/* cJSON ends strings at NUL, so a NUL within one would hide what follows it. */
static bool has_nul(const char *text, size_t size)
{
    if (memchr(text, 0, size))
        return true;
    for (size_t i = 0; i + 1 < size; i++) {
        if (text[i] != '\\')
            continue;
        if (size - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0)
            return true;
        i++;
    }
    return false;
}

static bool only_blanks(const char *from, const char *to)
{
    while (from < to && (*from == ' ' || *from == '\n' || *from == '\r' || *from == '\t'))
        from++;
    return from == to;
}

void doc_open(struct doc_reader *r, const char *what, const char *text, size_t size, size_t size_max, char *err,
              struct doc_node *ret_root)
{
    const char *end = text;
    *r = (struct doc_reader){.err = err};
    *ret_root = (struct doc_node){.reader = r};
    CHECK(str_copy(ret_root->path, sizeof ret_root->path, what) == 0);
    if (size > size_max) {
        doc_fail(ret_root, NULL, "%zu bytes, more than the %zu allowed", size, size_max);
        return;
    }
    if (has_nul(text, size)) {
        doc_fail(ret_root, NULL, "contains a NUL character");
        return;
    }
    r->root = cJSON_ParseWithLengthOpts(text, size, &end, 0);
    if (!r->root || !only_blanks(end, text + size))
        doc_fail(ret_root, NULL, "not JSON, at byte %td of %zu", end - text, size);
    else if (!cJSON_IsObject(r->root))
        doc_fail(ret_root, NULL, "not an object");
    else
        ret_root->json = r->root;
}

int doc_close(struct doc_reader *r)
{
    cJSON_Delete(r->root);
    r->root = NULL;
    return r->rc;
}

/* The value, or NULL after an error. */
static const cJSON *value_of(const struct doc_node *n, const char *key)
{
    if (n->reader->rc || !n->json || !key)
        return n->reader->rc ? NULL : n->json;
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(n->json, key);
    if (!v)
        doc_fail(n, key, "missing");
    return v;
}

static const char *string_of(const struct doc_node *n, const char *key)
{
    const cJSON *v = value_of(n, key);
    if (v && !cJSON_IsString(v))
        doc_fail(n, key, "not a string");
    return v && cJSON_IsString(v) ? v->valuestring : NULL;
}

/* Digits only, no leading zeros: a number has one form. */
static bool parse_u64(const char *s, uint64_t *ret)
{
    uint64_t x = 0;
    if (!*s || (s[0] == '0' && s[1]))
        return false;
    for (; *s; s++) {
        if (*s < '0' || *s > '9' || __builtin_mul_overflow(x, 10, &x) ||
            __builtin_add_overflow(x, (uint64_t)(*s - '0'), &x))
            return false;
    }
    *ret = x;
    return true;
}

uint64_t doc_get_id(const struct doc_node *n, const char *key, uint64_t min, uint64_t max)
{
    const char *s = string_of(n, key);
    uint64_t x;
    if (!s)
        return 0;
    if (!parse_u64(s, &x)) {
        doc_fail(n, key, "not an unsigned 64-bit integer");
        return 0;
    }
    if (x < min || x > max) {
        doc_fail(n, key, "%" PRIu64 " is not in %" PRIu64 "..%" PRIu64, x, min, max);
        return 0;
    }
    return x;
}

int64_t doc_get_step(const struct doc_node *n, const char *key, int64_t min, int64_t max)
{
    const char *s = string_of(n, key);
    uint64_t x;
    if (!s)
        return 0;
    if (strcmp(s, "none") == 0 && max == STEP_NONE)
        return STEP_NONE;
    bool minus = s[0] == '-';
    if (!parse_u64(s + minus, &x) || x >= (uint64_t)STEP_MAX || (minus && x == 0)) {
        doc_fail(n, key, "not a step (an integer below 2^62%s)", max == STEP_NONE ? ", or none" : "");
        return 0;
    }
    int64_t step = minus ? -(int64_t)x : (int64_t)x;
    if (step < min || step > max) {
        doc_fail(n, key, "step %" PRId64 " is out of range", step);
        return 0;
    }
    return step;
}

uint32_t doc_get_number(const struct doc_node *n, const char *key, uint32_t min, uint32_t max)
{
    const cJSON *v = value_of(n, key);
    if (!v)
        return 0;
    if (!cJSON_IsNumber(v) || v->valuedouble != floor(v->valuedouble)) {
        doc_fail(n, key, "not an integer");
        return 0;
    }
    if (!(v->valuedouble >= min && v->valuedouble <= max)) {
        doc_fail(n, key, "%.0f is not in %" PRIu32 "..%" PRIu32, v->valuedouble, min, max);
        return 0;
    }
    return (uint32_t)v->valuedouble;
}

bool doc_has(const struct doc_node *n, const char *key)
{
    return n->json && cJSON_GetObjectItemCaseSensitive(n->json, key) != NULL;
}

bool doc_get_bool(const struct doc_node *n, const char *key)
{
    const cJSON *v = value_of(n, key);
    if (v && !cJSON_IsBool(v))
        doc_fail(n, key, "neither true nor false");
    return v && cJSON_IsTrue(v);
}

/* Bytes of the well-formed UTF-8 character at s (RFC 3629: shortest form, no surrogates), or 0. */
static size_t utf8_size(const unsigned char *s)
{
    size_t size = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < size; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    }
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return size;
}

bool text_is_plain(const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    while (*p) {
        size_t n = utf8_size(p);
        if (n == 0 || *p < 0x20 || *p == 0x7f)
            return false;
        p += n;
    }
    return true;
}

void doc_get_text(const struct doc_node *n, const char *key, char *dst, size_t size, size_t min)
{
    const char *s = string_of(n, key);
    if (!s)
        return;
    size_t len = strlen(s);
    if (len < min)
        doc_fail(n, key, "empty");
    else if (len >= size)
        doc_fail(n, key, "%zu bytes, more than the %zu allowed", len, size - 1);
    else if (!text_is_plain(s))
        doc_fail(n, key, "control characters or not UTF-8");
    else
        memcpy(dst, s, len + 1);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

void doc_get_bytes(const struct doc_node *n, const char *key, uint8_t *dst, size_t size)
{
    const char *s = string_of(n, key);
    if (!s)
        return;
    if (strlen(s) != 2 * size) {
        doc_fail(n, key, "not %zu hexadecimal digits", 2 * size);
        return;
    }
    for (size_t i = 0; i < size; i++) {
        int high = hex_digit(s[2 * i]), low = hex_digit(s[2 * i + 1]);
        if (high < 0 || low < 0) {
            doc_fail(n, key, "not %zu hexadecimal digits", 2 * size);
            return;
        }
        dst[i] = (uint8_t)(high << 4 | low);
    }
}

uint32_t doc_get_word(const struct doc_node *n, const char *key, const char *const *words, uint32_t count)
{
    const char *s = string_of(n, key);
    char known[128] = "";
    if (!s)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(s, words[i]) == 0)
            return i;
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", words[i]);
    }
    doc_fail(n, key, "none of %s", known);
    return 0;
}

/* Paths are bounded by the depth that decoders read, not by what stands in the text. */
__attribute__((format(printf, 2, 3))) static void path_set(struct doc_node *n, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(n->path, sizeof n->path, format, args);
    va_end(args);
}

void doc_get_object(const struct doc_node *n, const char *key, struct doc_node *ret)
{
    const cJSON *v = value_of(n, key);
    if (v && !cJSON_IsObject(v))
        doc_fail(n, key, "not an object");
    ret->reader = n->reader;
    ret->json = v && cJSON_IsObject(v) ? v : NULL;
    path_set(ret, "%s.%s", n->path, key);
}

uint32_t doc_get_list(const struct doc_node *n, const char *key, uint32_t min, uint32_t max, struct doc_list *ret)
{
    const cJSON *v = value_of(n, key);
    uint32_t count = 0;
    *ret = (struct doc_list){.node = {.reader = n->reader}};
    path_set(&ret->node, "%s.%s", n->path, key);
    if (!v)
        return 0;
    if (!cJSON_IsArray(v)) {
        doc_fail(n, key, "not a list");
        return 0;
    }
    for (const cJSON *i = v->child; i && count <= max; i = i->next)
        count++;
    if (count < min || count > max) {
        doc_fail(n, key, "not %" PRIu32 "..%" PRIu32 " elements", min, max);
        return 0;
    }
    ret->node.json = v;
    ret->next = v->child;
    ret->count = count;
    return count;
}

void doc_list_next(struct doc_list *l, struct doc_node *ret)
{
    CHECK(l->next);
    ret->reader = l->node.reader;
    ret->json = l->next;
    path_set(ret, "%s[%" PRIu32 "]", l->node.path, l->at++);
    l->next = l->next->next;
}
