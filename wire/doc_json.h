/* doc_json.h - how wire/doc_*.c write and read JSON. Internal to wire/.
 *
 * Writing cannot fail. Reading goes on after the first error with zeros as values; only the first is told, and
 * doc_close returns it, so that a decoder is a plain list of fields. A decoder must not act on values (allocate,
 * loop) beyond what the getters' limits allow. */
#ifndef WIRE_DOC_JSON_H
#define WIRE_DOC_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire/doc.h"

enum {
    DOC_SMALL_MAX = 1 << 16,  /* bytes of a document of fixed extent */
    DOC_LARGE_MAX = 16 << 20, /* of one with lists of nodes or shards */
    SERVERS_MAX = 4096,
    LOCAL_SIZE_MAX = 65535, /* so that the number of ranks fits 32 bits */
    BOUND_MAX = 1000000,
    PATH_MAX_BYTES = 96,
};
/* Steps in documents stay below this, so that adding to one cannot overflow; or are STEP_NONE. */
#define STEP_MAX ((int64_t)1 << 62)

/* ---- writing ---- */
struct doc_writer {
    char *text;
    size_t len, cap;
    bool comma; /* the next thing needs one before it */
};
/* key NULL: an element of a list. */
void doc_put_open(struct doc_writer *w, const char *key, char bracket);
void doc_put_close(struct doc_writer *w, char bracket);
void doc_put_text(struct doc_writer *w, const char *key, const char *s);
void doc_put_id(struct doc_writer *w, const char *key, uint64_t x);     /* decimal in a string */
void doc_put_step(struct doc_writer *w, const char *key, int64_t step); /* likewise; STEP_NONE: "none" */
void doc_put_number(struct doc_writer *w, const char *key, uint32_t x);
/* words[index]; an index beyond `count` is a bug of the caller (an enum that was never set). */
void doc_put_word(struct doc_writer *w, const char *key, const char *const *words, uint32_t count, uint32_t index);
void doc_put_bool(struct doc_writer *w, const char *key, bool x);
void doc_put_bytes(struct doc_writer *w, const char *key, const uint8_t *p, size_t size); /* hexadecimal */
/* The text, for mem_free. */
char *doc_put_done(struct doc_writer *w);

/* ---- reading ---- */
struct doc_reader {
    cJSON *root;
    char *err;
    int rc;
};
/* An object or element, and where it stands ("view.member[3]"). json is NULL after an error. */
struct doc_node {
    struct doc_reader *reader;
    const cJSON *json;
    char path[PATH_MAX_BYTES];
};
struct doc_list {
    struct doc_node node; /* of the list itself */
    const cJSON *next;
    uint32_t count, at;
};
/* Parses; the root must be an object. Always follow with doc_close. */
void doc_open(struct doc_reader *r, const char *what, const char *text, size_t size, size_t size_max, char *err,
              struct doc_node *ret_root);
/* Frees the parsed text; 0 or KS_EPROTO. */
int doc_close(struct doc_reader *r);
void doc_fail(const struct doc_node *n, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* key NULL: the node itself is the value (elements of lists). All limits are inclusive. */
uint64_t doc_get_id(const struct doc_node *n, const char *key, uint64_t min, uint64_t max);
int64_t doc_get_step(const struct doc_node *n, const char *key, int64_t min, int64_t max);
uint32_t doc_get_number(const struct doc_node *n, const char *key, uint32_t min, uint32_t max);
bool doc_get_bool(const struct doc_node *n, const char *key);
/* Is there such a key at all? For fields that older writers do not know. */
bool doc_has(const struct doc_node *n, const char *key);
/* UTF-8 without control characters, at least `min` bytes, fits `size` with its NUL. */
void doc_get_text(const struct doc_node *n, const char *key, char *dst, size_t size, size_t min);
void doc_get_bytes(const struct doc_node *n, const char *key, uint8_t *dst, size_t size);
/* Index of the word in words (count of them), which end up in the message. */
uint32_t doc_get_word(const struct doc_node *n, const char *key, const char *const *words, uint32_t count);
void doc_get_object(const struct doc_node *n, const char *key, struct doc_node *ret);
/* Returns the number of elements; 0 after an error. */
uint32_t doc_get_list(const struct doc_node *n, const char *key, uint32_t min, uint32_t max, struct doc_list *ret);
/* The next element; call exactly `count` times. */
void doc_list_next(struct doc_list *l, struct doc_node *ret);

/* ---- parts that several documents share ---- */
void doc_put_view(struct doc_writer *w, const char *key, const struct view *v);
struct view *doc_get_view(const struct doc_node *n);                    /* NULL only after an error */
void doc_put_server(struct doc_writer *w, const struct view_server *s); /* the fields, without brackets */
void doc_get_server(const struct doc_node *n, struct view_server *s);
void doc_put_mode(struct doc_writer *w, const char *key, const struct mode *m);
void doc_get_mode(const struct doc_node *n, struct mode *m);

#endif
