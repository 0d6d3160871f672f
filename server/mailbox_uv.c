/* mailbox_uv.c - mailbox.h over a mutex and uv_async. */
#include "server/mailbox.h"

#include "base/mem.h"

void mail_free(struct mail *m)
{
    if (!m)
        return;
    if (m->prepare) {
        prepare_done(m->prepare);
        mem_free(m->prepare);
    }
    if (m->report) {
        report_done(m->report);
        mem_free(m->report);
    }
    view_free(m->view);
    mem_free(m->stats);
    mem_free(m);
}

static void on_async(uv_async_t *a)
{
    struct mailbox *b = a->data;
    pthread_mutex_lock(&b->mutex);
    struct mail *m = b->head;
    b->head = NULL;
    b->tail = &b->head;
    pthread_mutex_unlock(&b->mutex);
    while (m) {
        struct mail *next = m->next;
        b->each(b->arg, m);
        mail_free(m);
        m = next;
    }
}

int mailbox_init(struct mailbox *b, uv_loop_t *loop, void (*each)(void *arg, struct mail *m), void *arg)
{
    *b = (struct mailbox){.each = each, .arg = arg};
    b->tail = &b->head;
    pthread_mutex_init(&b->mutex, NULL);
    b->async.data = b;
    return uv_async_init(loop, &b->async, on_async);
}

void mailbox_post(struct mailbox *b, struct mail *m)
{
    m->next = NULL;
    pthread_mutex_lock(&b->mutex);
    *b->tail = m;
    b->tail = &m->next;
    pthread_mutex_unlock(&b->mutex);
    uv_async_send(&b->async);
}

void mailbox_close(struct mailbox *b)
{
    uv_close((uv_handle_t *)&b->async, NULL);
}

void mailbox_done(struct mailbox *b)
{
    while (b->head) {
        struct mail *next = b->head->next;
        mail_free(b->head);
        b->head = next;
    }
    b->tail = &b->head;
    pthread_mutex_destroy(&b->mutex);
}
