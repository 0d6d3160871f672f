/* store_record.h - what one record looks like on disk, and a batch that waits to be written.
 *
 * A value is CRC-32C of the payload (4 bytes, little-endian), then the payload. The key "format" belongs to
 * the store itself: its payload is "keepstep 1". Bytes from disk are input: they are checked, never trusted. */
#ifndef STORAGE_STORE_RECORD_H
#define STORAGE_STORE_RECORD_H

#include "storage/store.h"

enum { STORE_FORMAT = 1, STORE_HEAD_BYTES = 4, STORE_KEY_TEXT = 3 * STORE_KEY_MAX + 1 };

/* Writes one line into err (STORE_ERR_TEXT bytes), cut where it does not fit. */
void store_say(char *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

extern const char store_format_key[]; /* "format" */
int store_key_is_format(const void *key, size_t size);
/* For messages: printable bytes as they are, others as %XX. */
void store_key_text(const void *key, size_t size, char ret[STORE_KEY_TEXT]);

/* Size on disk and bytes on disk (dst of that size) of what op stores. */
size_t store_value_size(const struct store_op *op);
void store_value_write(const struct store_op *op, uint8_t *dst);
/* 0 and where the payload is inside value, or KS_ECORRUPT. */
int store_value_check(const void *value, size_t size, const uint8_t **ret_payload, size_t *ret_size);
/* The format record. 0, KS_ECORRUPT or KS_EVERSION, with "what is wrong" in err (STORE_ERR_TEXT bytes). */
size_t store_format_write(uint8_t dst[64]);
int store_format_check(const void *value, size_t size, char *err);

/* A submitted batch: its own copy of the ops, the caller's segments. */
struct store_batch {
    struct store_batch *next;
    uint64_t seq;
    size_t n, bytes; /* bytes: of all values on disk */
    struct store_op ops[];
};
struct store_batch_list {
    struct store_batch *first, **end;
    size_t count;
};

/* Checks the ops (CHECK: the caller is our own code). */
struct store_batch *store_batch_create(uint64_t seq, const struct store_op *ops, size_t n);
void store_batch_list_init(struct store_batch_list *l);
void store_batch_list_append(struct store_batch_list *l, struct store_batch *b);
/* Moves batches from the front of l to the end of to: at least one when there is one, at most n, and no more
 * once they hold `bytes`. */
void store_batch_list_take(struct store_batch_list *l, size_t n, size_t bytes, struct store_batch_list *to);
void store_batch_list_free(struct store_batch_list *l); /* the batches; leaves an empty list */

#endif
