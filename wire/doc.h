/* doc.h - control documents: JSON in frames, in the store and on disk.
 *
 * Encoders return a NUL-terminated string for mem_free. Decoders take any bytes, return 0 or
 * KS_EPROTO and say in err (of ERR_TEXT bytes) what is wrong and where ("view.member[3].join: not an
 * integer"); outputs are untouched on failure. 64-bit numbers travel as decimal strings. Unknown
 * keys are ignored, so that older readers survive newer writers. */
#ifndef WIRE_DOC_H
#define WIRE_DOC_H

#include "wire/dtype.h"
#include "wire/view.h"

enum { ERR_TEXT = 256, PREPARE_NODES_MAX = 4096, TENSOR_NAME_MAX = 256, TENSOR_DIMS_MAX = 16, NONCE_BYTES = 16,
       PROOF_BYTES = 32 };

/* ---- job settings: written once, by the first server, under "job" ---- */
struct job_doc {
    char job[NAME_MAX_BYTES];
    uint64_t created;                       /* tells jobs of the same name apart: data of an earlier one is not taken over */
    uint32_t nshards, chunk_bytes;
    uint32_t servers_min, members_min;     /* to wait for before the first view / the first step */
    uint32_t replicas;                      /* backups per shard that are wanted */
    uint32_t replicas_min;                  /* fewer: steps stop until there are as many again */
    bool deterministic;
    char durability[16];                    /* "none", "write" */
    struct mode mode;
    uint32_t wait_for_server_s;             /* 0: for ever */
};
char *job_encode(const struct job_doc *j);
int job_decode(const char *text, size_t size, struct job_doc *ret, char *err);

/* ---- "leader" and "servers/ID": who a server is ---- */
struct server_doc {
    struct view_server server;
    uint64_t heir_of;                       /* the life whose disk it holds; 0: none */
};
char *server_encode(const struct server_doc *s);
int server_decode(const char *text, size_t size, struct server_doc *ret, char *err);

char *view_encode(const struct view *v);
int view_decode(const char *text, size_t size, struct view **ret, char *err);

/* ---- joining ---- */
struct join_doc {
    uint64_t id;
    char name[NAME_MAX_BYTES];
    uint32_t local_size;
};
char *join_encode(const struct join_doc *j);
int join_decode(const char *text, size_t size, struct join_doc *ret, char *err);

/* ---- the view change (docs/PROTOCOL.md) ---- */
struct ballot {
    uint64_t term;
    uint64_t round;
};
struct shard_move {
    uint32_t shard;
    uint64_t to;
};
struct prepare {
    struct ballot ballot;
    struct view *base;                      /* the view that is being changed; owned */
    uint64_t controller;                    /* id of the sender */
    uint32_t ngone, njoins;
    uint64_t *gone;                         /* ids, ascending; servers and members */
    struct join_doc *joins;
    uint32_t nheirs;                        /* returning servers that report from their disk */
    uint64_t *heir, *heir_of;
    bool mode_change;                       /* members report their clock and start no later step */
    uint32_t nmoves;                        /* backups that become primary: fenced against the old one from now on */
    struct shard_move *move;
};
void prepare_done(struct prepare *p);       /* frees what it owns */
void prepare_copy(struct prepare *dst, const struct prepare *src);
char *prepare_encode(const struct prepare *p);
int prepare_decode(const char *text, size_t size, struct prepare *ret, char *err);

enum holder_role { HOLDER_PRIMARY = 1, HOLDER_BACKUP, HOLDER_JOINER, HOLDER_HEIR };
struct shard_report {
    uint32_t shard;
    enum holder_role role;
    bool full;              /* JOINER: it has everything (SYNC_END) since it is listed under this primary */
    uint32_t nsynced;       /* PRIMARY: joiners that confirmed (SYNC_OK) */
    uint64_t synced[BACKUPS_MAX];
    int64_t complete;       /* c (what L is the minimum of) */
    int64_t join;           /* j (what J is the maximum of) */
};
struct report {
    uint64_t from;
    struct ballot ballot;
    uint64_t base_epoch;
    int64_t clock;          /* members: the step they are in; -1 otherwise */
    uint32_t nshards;
    struct shard_report *shard;   /* owned */
};
void report_done(struct report *r);
char *report_encode(const struct report *r);
int report_decode(const char *text, size_t size, struct report *ret, char *err);

/* ---- tensors ---- */
enum tensor_kind { TENSOR_REDUCE = 1, TENSOR_PARAM };
enum tensor_op { TENSOR_SUM = 1, TENSOR_AVERAGE };
enum finite_policy { FINITE_APPLY = 1, FINITE_REJECT, FINITE_SKIP };
struct tensor_spec {
    char name[TENSOR_NAME_MAX];
    uint64_t id;                            /* hash_bytes(name), never 0 */
    enum dtype dtype;
    uint32_t ndims;                         /* 0: a scalar */
    uint64_t dim[TENSOR_DIMS_MAX];
    enum tensor_kind kind;
    enum tensor_op op;
    enum finite_policy finite;
    char group[NAME_MAX_BYTES];             /* parameter group, "default" */
    char optimizer[256];                    /* "adamw lr=0.001 wd=0.01"; params only; see server/optim.h */
};
/* A petabyte: far beyond any memory, and every sum and product of sizes stays within 64 bits. */
#define TENSOR_BYTES_MAX ((uint64_t)1 << 50)
uint64_t tensor_id(const char *name);
/* UTF-8 without control characters: what documents carry. */
bool text_is_plain(const char *s);
uint64_t tensor_count(const struct tensor_spec *s);                     /* elements */
uint64_t tensor_bytes(const struct tensor_spec *s);
/* At least 1; UINT32_MAX: more than chunk numbers can say, refuse the tensor. */
uint32_t tensor_chunks(const struct tensor_spec *s, uint32_t chunk_bytes);
/* Of one chunk, a whole number of elements (chunk_bytes is a multiple of 8); 0 beyond the last. */
uint32_t tensor_chunk_bytes(const struct tensor_spec *s, uint32_t chunk, uint32_t chunk_bytes);
/* "f32[64,10] param op=average finite=reject group=default optimizer="adamw lr=0.001"" for messages: all that
 * tensor_same compares, so that the texts of two that differ do differ. */
void tensor_describe(const struct tensor_spec *s, char *out, size_t size);
/* Equal in everything that must be equal between two who declare the same name. */
bool tensor_same(const struct tensor_spec *a, const struct tensor_spec *b);
char *tensor_encode(const struct tensor_spec *s);
int tensor_decode(const char *text, size_t size, struct tensor_spec *ret, char *err);

/* ---- handshake (hello and its three answers) ---- */
struct hello {
    char job[NAME_MAX_BYTES];
    char role[16];                          /* "member", "server", "operator" */
    uint64_t id;                            /* 0: operator */
    uint64_t epoch;                         /* of its view; 0: none */
    uint32_t chunk_bytes;                   /* 0: control connection */
    uint32_t loop;                          /* role server, data connection: the connecting loop */
    uint8_t nonce[NONCE_BYTES];
};
char *hello_encode(const struct hello *h);
int hello_decode(const char *text, size_t size, struct hello *ret, char *err);
struct proof_doc {
    uint64_t id;                            /* of the prover */
    uint64_t epoch;                         /* of its view */
    uint8_t nonce[NONCE_BYTES];
    uint8_t proof[PROOF_BYTES];
};
char *proof_encode(const struct proof_doc *p);
int proof_decode(const char *text, size_t size, struct proof_doc *ret, char *err);

/* ---- mode request ---- */
char *mode_encode(const struct mode *m);
int mode_decode(const char *text, size_t size, struct mode *ret, char *err);
/* "sync", "ssp:3" or "staleness:3", "async" */
int mode_parse(const char *text, struct mode *ret);
void mode_format(const struct mode *m, char *out, size_t size);

#endif
