/* keepstep_err.h - the one table of error codes.
 *
 * Every function of Keepstep that can fail returns 0 or one of these negative
 * numbers. Whoever detects an error logs its exact cause once; callers pass the
 * number on. Installed next to keepstep.h, which includes it. */
#ifndef KEEPSTEP_ERR_H
#define KEEPSTEP_ERR_H

#define KS_ERROR_TABLE(X)                                                        \
    X(KS_OK, 0, "ok")                                                            \
    X(KS_EINVAL, -1, "an argument is not valid")                                 \
    X(KS_ENOMEM, -2, "a configured memory limit is reached")                     \
    X(KS_ETIMEOUT, -3, "the deadline passed")                                    \
    X(KS_ECLOSED, -4, "the connection or handle is closed")                      \
    X(KS_EIO, -5, "the disk or network failed")                                  \
    X(KS_EPROTO, -6, "bytes that do not follow the protocol")                    \
    X(KS_EAUTH, -7, "the token is wrong")                                        \
    X(KS_EEXIST, -8, "it exists already with other properties")                  \
    X(KS_ENOENT, -9, "no such thing")                                            \
    X(KS_EBUSY, -10, "in use by somebody else")                                  \
    X(KS_EFENCED, -11, "this life was removed from the job")                     \
    X(KS_ESTATE, -12, "not possible in this state")                              \
    X(KS_EUNAVAIL, -13, "not reachable at the moment")                           \
    X(KS_EUNKNOWN, -14, "the outcome is unknown: it may or may not have happened") \
    X(KS_ECONFLICT, -15, "somebody else changed it first")                       \
    X(KS_ECORRUPT, -16, "a checksum or format is wrong")                         \
    X(KS_EFULL, -17, "no space is left on the disk")                             \
    X(KS_EVERSION, -18, "made by another format version")                        \
    X(KS_ELATE, -19, "the push came too late and was dropped")                   \
    X(KS_ESTALE, -20, "the push was older than the staleness bound")             \
    X(KS_ENOTFINITE, -21, "the push held NaN or infinity")                       \
    X(KS_EJOB, -22, "the job has ended")                                         \
    X(KS_EAGAIN, -23, "try again")

enum ks_error {
#define KS_X(name, value, text) name = value,
    KS_ERROR_TABLE(KS_X)
#undef KS_X
};

#endif
