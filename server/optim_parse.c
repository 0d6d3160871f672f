/* Optimizers as text: "sgd lr=0.1 momentum=0.9". */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "keepstep_err.h"
#include "server/optim.h"

enum { ERR_SIZE = 256, WORD_SIZE = 64 };

#define BIT(o) (1u << (o))

static const struct {
    const char *name;
    unsigned options;
} kinds[] = {
    [OPTIM_ADD] = {"add", 0},
    [OPTIM_SGD] = {"sgd", BIT(OPT_LR) | BIT(OPT_WD) | BIT(OPT_MOMENTUM) | BIT(OPT_DAMPENING) | BIT(OPT_NESTEROV)},
    [OPTIM_ADAGRAD] = {"adagrad",
                       BIT(OPT_LR) | BIT(OPT_WD) | BIT(OPT_LR_DECAY) | BIT(OPT_INITIAL_ACCUMULATOR) | BIT(OPT_EPS)},
    [OPTIM_RMSPROP] = {"rmsprop", BIT(OPT_LR) | BIT(OPT_WD) | BIT(OPT_MOMENTUM) | BIT(OPT_ALPHA) | BIT(OPT_EPS)},
    [OPTIM_ADAM] = {"adam", BIT(OPT_LR) | BIT(OPT_WD) | BIT(OPT_BETA1) | BIT(OPT_BETA2) | BIT(OPT_EPS)},
    [OPTIM_ADAMW] = {"adamw", BIT(OPT_LR) | BIT(OPT_WD) | BIT(OPT_BETA1) | BIT(OPT_BETA2) | BIT(OPT_EPS)},
};

enum range { ANY, NOT_NEGATIVE, BELOW_ONE, UP_TO_ONE, BOOLEAN };

static const char *const range_text[] = {
    [ANY] = "a finite number",   [NOT_NEGATIVE] = "at least 0", [BELOW_ONE] = "at least 0 and below 1",
    [UP_TO_ONE] = "from 0 to 1", [BOOLEAN] = "0 or 1",
};

static const struct {
    const char *name;
    enum range range;
} options[OPT_MAX] = {
    [OPT_LR] = {"lr", NOT_NEGATIVE},
    [OPT_WD] = {"wd", NOT_NEGATIVE},
    [OPT_MOMENTUM] = {"momentum", NOT_NEGATIVE},
    [OPT_DAMPENING] = {"dampening", ANY},
    [OPT_NESTEROV] = {"nesterov", BOOLEAN},
    [OPT_BETA1] = {"beta1", BELOW_ONE},
    [OPT_BETA2] = {"beta2", BELOW_ONE},
    [OPT_EPS] = {"eps", NOT_NEGATIVE},
    [OPT_ALPHA] = {"alpha", UP_TO_ONE},
    [OPT_LR_DECAY] = {"lr_decay", NOT_NEGATIVE},
    [OPT_INITIAL_ACCUMULATOR] = {"initial_accumulator", NOT_NEGATIVE},
};

static bool known(enum optim_option o)
{
    return o > 0 && o < OPT_MAX && options[o].name;
}

const char *optim_option_name(enum optim_option o)
{
    return known(o) ? options[o].name : "?";
}

bool optim_has_option(enum optim_kind kind, enum optim_option o)
{
    return kind >= OPTIM_ADD && kind <= OPTIM_ADAMW && known(o) && (kinds[kind].options & BIT(o));
}

int optim_option_parse(const char *name, enum optim_option *ret)
{
    if (strcmp(name, "weight_decay") == 0)
        name = "wd";
    for (enum optim_option o = 1; o < OPT_MAX; o++) {
        if (options[o].name && strcmp(options[o].name, name) == 0) {
            *ret = o;
            return 0;
        }
    }
    return KS_EINVAL;
}

static bool in_range(enum range range, double value)
{
    switch (range) {
    case ANY:
        return true;
    case NOT_NEGATIVE:
        return value >= 0;
    case BELOW_ONE:
        return value >= 0 && value < 1;
    case UP_TO_ONE:
        return value >= 0 && value <= 1;
    case BOOLEAN:
        return value == 0 || value == 1;
    }
    return false;
}

int optim_option_check(enum optim_option o, double value, char *err)
{
    if (!known(o)) {
        snprintf(err, ERR_SIZE, "there is no optimizer option with number %d", (int)o);
        return KS_EINVAL;
    }
    if (isfinite(value) && in_range(options[o].range, value))
        return 0;
    snprintf(err, ERR_SIZE, "optimizer option %s is %.9g; it must be %s", options[o].name, value,
             range_text[options[o].range]);
    return KS_EINVAL;
}

/* Appends " a, b, c" of a kind's options. */
static void list_options(enum optim_kind kind, char *err)
{
    size_t len = strlen(err);
    const char *separator = " ";
    for (enum optim_option o = 1; o < OPT_MAX; o++) {
        if (!optim_has_option(kind, o))
            continue;
        len += (size_t)snprintf(err + len, ERR_SIZE - len, "%s%s", separator, options[o].name);
        separator = ", ";
    }
    if (kind == OPTIM_ADD)
        snprintf(err + len, ERR_SIZE - len, " none");
}

static int fail_option(enum optim_kind kind, const char *name, char *err)
{
    snprintf(err, ERR_SIZE, "optimizer %s has no option \"%s\"; its options are", kinds[kind].name, name);
    list_options(kind, err);
    return KS_EINVAL;
}

int optim_option_set(struct optim *o, enum optim_option option, double value, char *err)
{
    struct optim changed = *o;
    int rc = optim_option_check(option, value, err);
    if (rc < 0)
        return rc;
    if (!optim_has_option(o->kind, option))
        return fail_option(o->kind, options[option].name, err);
    changed.option[option] = value;
    if (optim_slots(&changed) != optim_slots(o)) {
        snprintf(err, ERR_SIZE,
                 "optimizer option %s cannot go from %.9g to %.9g during a run: the tensor's state would have another "
                 "size; declare it with %s above 0",
                 options[option].name, o->option[option], value, options[option].name);
        return KS_EINVAL;
    }
    *o = changed;
    return 0;
}

/* The next blank-separated word of *text; *text moves behind it. 0 at the end, -1: too long. */
static int word_next(const char **text, char word[WORD_SIZE])
{
    const char *p = *text;
    while (isspace((unsigned char)*p))
        p++;
    size_t len = 0;
    for (; p[len] && !isspace((unsigned char)p[len]); len++) {
        if (len == WORD_SIZE - 1)
            return -1;
        word[len] = p[len];
    }
    word[len] = 0;
    *text = p + len;
    return len > 0;
}

static int number_parse(const char *text, double *ret)
{
    char *end;
    if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0) {
        *ret = *text == 't';
        return 0;
    }
    /* Not what strtod takes besides: blanks, hexadecimal, infinity, NaN. */
    if (text[strspn(text, "0123456789.eE+-")])
        return KS_EINVAL;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value))
        return KS_EINVAL;
    *ret = value;
    return 0;
}

static int option_set(struct optim *o, unsigned *seen, enum optim_option option, const char *text, char *err)
{
    double value;
    if (*seen & BIT(option)) {
        snprintf(err, ERR_SIZE, "optimizer option %s is given twice; leave one out", options[option].name);
        return KS_EINVAL;
    }
    if (number_parse(text, &value) < 0) {
        snprintf(err, ERR_SIZE, "optimizer option %s is \"%s\"; it must be a number, as in %s=0.1",
                 options[option].name, text, options[option].name);
        return KS_EINVAL;
    }
    int rc = optim_option_check(option, value, err);
    if (rc < 0)
        return rc;
    *seen |= BIT(option);
    o->option[option] = value;
    return 0;
}

static int betas_set(struct optim *o, unsigned *seen, char *text, char *err)
{
    char *comma = strchr(text, ',');
    if (!comma) {
        snprintf(err, ERR_SIZE, "optimizer option betas is \"%s\"; it must be two numbers, as in betas=0.9,0.999",
                 text);
        return KS_EINVAL;
    }
    *comma = 0;
    int rc = option_set(o, seen, OPT_BETA1, text, err);
    return rc < 0 ? rc : option_set(o, seen, OPT_BETA2, comma + 1, err);
}

static int word_apply(struct optim *o, unsigned *seen, char *word, char *err)
{
    enum optim_option option;
    char *equals = strchr(word, '=');
    if (!equals) {
        snprintf(err, ERR_SIZE, "optimizer %s: \"%s\" is not name=number; its options are", kinds[o->kind].name, word);
        list_options(o->kind, err);
        return KS_EINVAL;
    }
    *equals = 0;
    if (strcmp(word, "betas") == 0 && optim_has_option(o->kind, OPT_BETA1))
        return betas_set(o, seen, equals + 1, err);
    if (optim_option_parse(word, &option) < 0 || !optim_has_option(o->kind, option))
        return fail_option(o->kind, word, err);
    return option_set(o, seen, option, equals + 1, err);
}

static int kind_parse(const char *word, enum optim_kind *ret, char *err)
{
    for (enum optim_kind k = OPTIM_ADD; k <= OPTIM_ADAMW; k++) {
        if (strcmp(kinds[k].name, word) == 0) {
            *ret = k;
            return 0;
        }
    }
    snprintf(err, ERR_SIZE, "there is no optimizer \"%s\"; there are add, sgd, adagrad, rmsprop, adam, adamw", word);
    return KS_EINVAL;
}

static void defaults_set(struct optim *o)
{
    double *v = o->option;
    bool adam = o->kind == OPTIM_ADAM || o->kind == OPTIM_ADAMW;
    if (o->kind != OPTIM_ADD && o->kind != OPTIM_SGD)
        v[OPT_LR] = adam ? 1e-3 : 1e-2;
    if (adam) {
        v[OPT_BETA1] = 0.9;
        v[OPT_BETA2] = 0.999;
    }
    if (o->kind == OPTIM_ADAMW)
        v[OPT_WD] = 1e-2;
    if (o->kind == OPTIM_RMSPROP)
        v[OPT_ALPHA] = 0.99;
    if (adam || o->kind == OPTIM_RMSPROP)
        v[OPT_EPS] = 1e-8;
    if (o->kind == OPTIM_ADAGRAD)
        v[OPT_EPS] = 1e-10;
}

static int check_whole(const struct optim *o, unsigned seen, char *err)
{
    if (o->kind == OPTIM_SGD && !(seen & BIT(OPT_LR))) {
        snprintf(err, ERR_SIZE, "optimizer sgd needs a learning rate, as in \"sgd lr=0.1\"");
        return KS_EINVAL;
    }
    if (o->option[OPT_NESTEROV] != 0 && (o->option[OPT_MOMENTUM] == 0 || o->option[OPT_DAMPENING] != 0)) {
        snprintf(err, ERR_SIZE, "optimizer sgd: nesterov needs momentum above 0 and no dampening");
        return KS_EINVAL;
    }
    return 0;
}

int optim_parse(const char *text, struct optim *ret, char *err)
{
    char word[WORD_SIZE];
    struct optim o = {0};
    unsigned seen = 0;
    int more = word_next(&text, word);
    int rc = more < 0 ? 0 : kind_parse(more ? word : "", &o.kind, err);
    if (rc < 0)
        return rc;
    if (more > 0)
        defaults_set(&o);
    while (more > 0 && (more = word_next(&text, word)) > 0) {
        rc = word_apply(&o, &seen, word, err);
        if (rc < 0)
            return rc;
    }
    if (more < 0) {
        snprintf(err, ERR_SIZE, "an optimizer's words have less than %d characters; this is longer: \"%.40s...\"",
                 WORD_SIZE, text + strspn(text, " \t\n\v\f\r"));
        return KS_EINVAL;
    }
    rc = check_whole(&o, seen, err);
    if (rc == 0)
        *ret = o;
    return rc;
}
