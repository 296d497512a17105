/*
 * Lend, read, acknowledge, settle, return: one lender, two readers, and everything that may go wrong between them.
 * model/README.md says what this model states, what it leaves out, and how large it is. scripts/check_model runs it.
 *
 * Parts.  The lender has two pages. The destination is one instance of two members, rank 0 and rank 1; rank 0 may die
 * and come back under a new epoch. Two transfers follow each other; in each of them either rank leases one page from
 * the lender. So there are four reader's keys, k = 2 * transfer + rank, and each has one lease at the lender (for
 * reading) and one at home (for writing, on the one page that a member's pool has here).
 *
 * The bus.  What was published stays: whoever it is for may act on it at any later step, in any order with other
 * messages, or never. That is loss, repetition and reordering in one, and it needs no queue: a message is the state
 * of its sender that it reports, and such states never go back. KVB_SETTLE is a log: it lags, and keeps its order.
 *
 * Bytes.  A page has two halves, each of which carries the tag of the content it belongs to: page and generation. A
 * get copies one half and then the other, and so does a writer, so that a read of reused memory is seen as a wrong tag.
 *
 * Each step is one `atomic` in one of five processes; between two steps anything else may happen. Every step moves
 * something forward for good, so each run ends; what has not been returned by then never will be.
 *
 * PLANT_... each plants one fault, which has to lead to a counter-example.
 */

#ifndef TRANSFERS
#define TRANSFERS 2
#endif
#define KEYS (2 * TRANSFERS)
#define PAGES 2
#define NO_PAGE PAGES
#ifndef CRASHES
#define CRASHES 1 /* deaths in all, of any reader */
#endif
#ifndef ISOLATIONS
#define ISOLATIONS 1 /* how many reader processes the lender isolates */
#endif
#ifndef REWRITES
#define REWRITES 1 /* how often each page is written again after its first content */
#endif

/* Processes of the readers: 0 is rank 0 in its first epoch, 1 is rank 0 in its second, 2 is rank 1. */
#define PROCESSES 3
#define ABSENT 0
#define UP 1
#define EXITING 2 /* its leader is gone, a thread may still be copying (P6) */
#define DEAD 3    /* its pidfd is readable: nothing of it runs */

/* A key's read lease at the lender. Only moves upwards. */
#define UNKNOWN 0
#define LENT 1     /* the grant has left, or may have */
#define RETURNED 2 /* also the tombstone of a key that was closed before it was lent (P18) */

/* What the reader does under a key. Only moves upwards. ENDED is what its `released(key)` and its facts report. */
#define QUIET 0
#define ASKED 1
#define READING 2
#define CANCELLED 3 /* its result is fixed, its get is still out */
#define ENDED 4     /* its result is fixed and its access has ended */
#define GONE 5      /* its process died before that */

/* The get of a key. */
#define NO_GET 0
#define POSTED 1
#define HALF_LANDED 2
#define LANDED 3

/* A key's write lease at the destination. Only moves upwards. */
#define UNTAKEN 0
#define TAKEN 1
#define APPLIED 2 /* settled here; its name is not visible yet (P10) */
#define VISIBLE 3
#define FREED 4

/* What the writer of a source page does. */
#define IDLE 0
#define RAISED 1
#define HALF_WRITTEN 2

byte generation[PAGES] = 2;      /* even: sealed, odd: being written (P1) */
byte left_half[PAGES];
byte right_half[PAGES];
byte writer[PAGES];

byte lease[KEYS];
byte page[KEYS] = NO_PAGE;       /* what the grant says */
byte granted_generation[KEYS];   /* what the grant says */

byte reader[KEYS];
byte get[KEYS];
bit delivered[KEYS];
bit abandoned[KEYS];             /* on the bus as well: a refusal of what is decided (P11) */
byte write_lease[KEYS];
bit applied[KEYS];
#ifdef PLANT_AFTER_READ
byte before[KEYS];
#endif
#ifdef PLANT_NO_REPEAT
bit lost[KEYS];                  /* the in-band word got lost */
#endif

byte process[PROCESSES];
byte pool_owner[PROCESSES];      /* key + 1 of the lease on the only page of that process's pool, or 0 */
bit spoiled[PROCESSES];          /* a half landed on that page that is not what its owner was granted */
bit isolated[PROCESSES];

bit opened[TRANSFERS];           /* open, settle, void: the log. confirm: every member has applied (P10) */
bit settled[TRANSFERS];
bit kept[TRANSFERS];             /* the decision's bounds: all ranks have the page */
bit voided[TRANSFERS];
bit confirmed[TRANSFERS];
bit rank0_restarted;             /* whether `open` of the second transfer names the second epoch of rank 0 (P12) */

byte crashes;
byte isolations;

#define TAG(p, g) ((p) * 16 + (g))
#define WANTED(k) TAG(page[k], granted_generation[k])
#define PROC(k) ((k) % 2 == 1 -> 2 : ((k) == 2 -> rank0_restarted : 0))
/* Without PROC, whose `->` an LTL formula would take for its own. */
#define RUNS(k) \
    (process[2] == UP && (k) % 2 == 1 || process[0] == UP && ((k) == 0 || (k) == 2 && !rank0_restarted) || \
     process[1] == UP && (k) == 2 && rank0_restarted)
#define MOVING(k) (get[k] == POSTED || get[k] == HALF_LANDED)
#define HAS_GRANT(k) (lease[k] >= LENT && page[k] != NO_PAGE)
#define LENT_ON(k, p) (lease[k] == LENT && page[k] == (p))

/* The claims. A trail that breaks one ends with its words. */
#define HOLDS(claim, what) if :: (what) :: else -> printf(claim); assert(false) fi
#define PAGE_CLAIM "BROKEN (a): a page is written again while somebody may touch it unfenced\n"
#define BYTES_CLAIM "BROKEN (b): bytes of reused memory are delivered or used\n"
#define ONCE_CLAIM "BROKEN (c): a lease is returned twice\n"
#define EVIDENCE_CLAIM "BROKEN (c): a lease is returned while its reader may still deliver from the page\n"
#define RETURN_CLAIM "BROKEN (d): no step is left, and something is still lent\n"
#define NAMES_CLAIM "BROKEN (P10): a page is visible whose transfer is voided\n"

/* Ground truth, which no part of the protocol may look at: whether the reader of a key may still touch the lent page.
 * It may if its get moves, or if it is alive and can still accept the grant. */
#define MAY_READ(k) (HAS_GRANT(k) && (MOVING(k) || (RUNS(k) && reader[k] == ASKED)))
#define FENCED(k) (isolated[PROC(k)] && generation[page[k]] != granted_generation[k])

/* (a) for a source page: the first byte of its next content finds nobody who may take it for the old content. */
#define REUSABLE_BY(k, p) (page[k] != (p) || !MAY_READ(k) || FENCED(k))
/* (a) for a destination page: the next lease finds no get that may still land on it. */
#define CLEAR_OF(j, k) (PROC(j) != PROC(k) || !MOVING(j))
/* (b) what is delivered, and what is used, is what was granted. */
#define RIGHT_BYTES(k) (pool_owner[PROC(k)] == (k) + 1 && !spoiled[PROC(k)])

#if TRANSFERS == 2
#define ALL(what) (what(0) && what(1) && what(2) && what(3))
#define ALL_WITH(what, x) (what(0, x) && what(1, x) && what(2, x) && what(3, x))
#define EACH_KEY(step) step(0, 1, 0) step(1, 0, 0) step(2, 3, 1) step(3, 2, 1)
#define EACH_TRANSFER(step) step(0, 0, 1) step(1, 2, 3)
#define EACH_PROCESS(step) step(0) step(1) step(2)
#else
#define ALL(what) (what(0) && what(1))
#define ALL_WITH(what, x) (what(0, x) && what(1, x))
#define EACH_KEY(step) step(0, 1, 0) step(1, 0, 0)
#define EACH_TRANSFER(step) step(0, 0, 1)
#define EACH_PROCESS(step) step(0) step(2)
#endif

/* (d) Whatever was lent is returned, and so is every write lease of a process that lives. */
#define READ_RETURNED(k) (lease[k] != LENT)
#define WRITE_RETURNED(k) (write_lease[k] == UNTAKEN || write_lease[k] == FREED || !RUNS(k))
#define NOTHING_LENT (ALL(READ_RETURNED) && ALL(WRITE_RETURNED))

/* A key that nobody will ask about any more is forgotten, so that states which differ in nothing else are one. */
#define FORGET(k) \
    if :: lease[k] == RETURNED && reader[k] >= ENDED && write_lease[k] == FREED -> \
          page[k] = NO_PAGE; granted_generation[k] = 0 \
       :: else fi

/* ---- the lender ------------------------------------------------------------------------------------------------- */

/* (c) A lease is returned once, and only when its reader cannot touch the page or cannot deliver what it reads. */
#define RETURN(k) \
    HOLDS(ONCE_CLAIM, lease[k] == LENT); \
    HOLDS(EVIDENCE_CLAIM, !MAY_READ(k) || FENCED(k)); \
    lease[k] = RETURNED; FORGET(k)

#define SEALED(p) (generation[p] % 2 == 0)
#define LEND(k, p) \
    :: atomic { lease[k] == UNKNOWN && reader[k] >= ASKED && SEALED(p) && !isolated[PROC(k)] && RUNS(k) && \
        (k != 0 || p == 0) -> /* which page is the first one is only a matter of its name */ \
        lease[k] = LENT; page[k] = p; granted_generation[k] = generation[p]; \
        printf("lender lends page %d in generation %d under key %d\n", p, generation[p], k) }

#ifdef PLANT_TIMER
#define RETURN_ON_A_TIMER(k) \
    :: atomic { lease[k] == LENT -> printf("lender returns the lease of key %d because a timer ran out\n", k); RETURN(k) }
#else
#define RETURN_ON_A_TIMER(k)
#endif

#ifdef PLANT_REPEAT
#define TAKES_THE_WORD(k) HAS_GRANT(k)
#else
#define TAKES_THE_WORD(k) (lease[k] == LENT)
#endif

#ifdef PLANT_EPOCH
#define TOLD(k) (reader[k] == ENDED || (PROC(k) == 0 && process[1] == UP))
#elif defined(PLANT_FIRST_ACK)
#define TOLD_FOR(j, k) (reader[j] == ENDED && HAS_GRANT(j) && page[j] == page[k])
#define TOLD(k) (TOLD_FOR(0, k) || TOLD_FOR(1, k))
#elif defined(PLANT_NO_REPEAT)
#define TOLD(k) (reader[k] == ENDED && !lost[k])
#else
#define TOLD(k) (reader[k] == ENDED)
#endif

#ifdef PLANT_ZOMBIE
#define PROVED_DEAD(k) (process[PROC(k)] >= EXITING)
#else
#define PROVED_DEAD(k) (process[PROC(k)] == DEAD)
#endif

#define LENDER_STEPS(k, other, t) \
    LEND(k, 0) LEND(k, 1) \
    :: atomic { TAKES_THE_WORD(k) && TOLD(k) -> \
        printf("lender hears that access under key %d has ended (peer_ack), returns its lease\n", k); RETURN(k) } \
    :: atomic { lease[k] == UNKNOWN && TOLD(k) -> lease[k] = RETURNED; \
        printf("lender hears that key %d is closed before it lent anything, and remembers it\n", k) } \
    :: atomic { lease[k] == LENT && PROVED_DEAD(k) -> \
        printf("lender sees that the reader of key %d is dead (process_dead), returns its lease\n", k); RETURN(k) } \
    :: atomic { lease[k] == LENT && FENCED(k) -> \
        printf("lender returns the lease of key %d (fenced)\n", k); RETURN(k) } \
    RETURN_ON_A_TIMER(k)

/* A page's writer: raise, write, seal. Raising while an isolated reader still holds the page is the fence (P5). */
#define NOT_LENT(k, p) (!LENT_ON(k, p))
#define LETS_GO(k, p) (!LENT_ON(k, p) || isolated[PROC(k)])
#define LENT_TO(k, p, i) (LENT_ON(k, p) && PROC(k) == (i))
#define LENT_TO_OTHER(k, p, i) (LENT_ON(k, p) && PROC(k) != (i) && !isolated[PROC(k)])
#if TRANSFERS == 2
#define ANY(what, p) (what(0, p) || what(1, p) || what(2, p) || what(3, p))
#define ANY3(what, p, i) (what(0, p, i) || what(1, p, i) || what(2, p, i) || what(3, p, i))
#else
#define ANY(what, p) (what(0, p) || what(1, p))
#define ANY3(what, p, i) (what(0, p, i) || what(1, p, i))
#endif

/* A page to which no lease of its present content is attached any more is as good as a new one: writing it then would
 * only change the names of contents. */
#define ATTACHED(k, p) (page[k] == (p) && granted_generation[k] == generation[p])
#define MAY_RAISE(p) \
    (writer[p] == IDLE && generation[p] < 2 + 2 * REWRITES && ANY(ATTACHED, p))
#define FENCE(p, i) \
    :: atomic { MAY_RAISE(p) && !isolated[i] && isolations < ISOLATIONS && \
        ANY3(LENT_TO, p, i) && !ANY3(LENT_TO_OTHER, p, i) -> \
        isolated[i] = 1; isolations++; generation[p]++; writer[p] = RAISED; \
        printf("lender isolates process %d and raises the generation of page %d to %d\n", i, p, generation[p]) }

#ifdef PLANT_SEAL_EARLY
#define WRITE_LEFT(p) left_half[p] = TAG(p, generation[p] + 1); generation[p]++
#define WRITE_RIGHT(p) right_half[p] = TAG(p, generation[p])
#else
#define WRITE_LEFT(p) left_half[p] = TAG(p, generation[p] + 1)
#define WRITE_RIGHT(p) right_half[p] = TAG(p, generation[p] + 1); generation[p]++
#endif

#define PAGE_STEPS(p) \
    :: atomic { MAY_RAISE(p) && ALL_WITH(LETS_GO, p) -> generation[p]++; writer[p] = RAISED; \
        printf("lender raises the generation of page %d to %d\n", p, generation[p]) } \
    FENCE(p, 0) FENCE(p, 1) FENCE(p, 2) \
    :: atomic { writer[p] == RAISED && ALL_WITH(NOT_LENT, p) -> \
        printf("lender writes the left half of page %d anew\n", p); \
        HOLDS(PAGE_CLAIM, ALL_WITH(REUSABLE_BY, p)); \
        WRITE_LEFT(p); writer[p] = HALF_WRITTEN } \
    :: atomic { writer[p] == HALF_WRITTEN -> WRITE_RIGHT(p); writer[p] = IDLE; \
        printf("lender has written the right half of page %d; its generation is %d\n", p, generation[p]) }

proctype Lender() {
end:
    do
    EACH_KEY(LENDER_STEPS)
    PAGE_STEPS(0)
    PAGE_STEPS(1)
    od
}

/* ---- the readers: the members of the destination, and what moves their bytes ------------------------------------- */

#ifdef PLANT_AFTER_READ
#define NOTE_BEFORE(k) before[k] = generation[page[k]]
#define UNCHANGED(k) (generation[page[k]] == before[k] && SEALED(page[k]))
#else
#define NOTE_BEFORE(k)
#define UNCHANGED(k) (generation[page[k]] == granted_generation[k])
#endif

#ifdef PLANT_SETTLE_EARLY
#define HAS_RESULT(k) (reader[k] >= CANCELLED)
#else
#define HAS_RESULT(k) (reader[k] == ENDED)
#endif

#ifdef PLANT_VISIBLE_EARLY
#define MAY_SHOW(t) settled[t]
#else
#define MAY_SHOW(t) confirmed[t]
#endif

#ifdef PLANT_NO_REPEAT
#define MAY_LOSE(k) if :: lost[k] = 1; printf("the word gets lost\n") :: skip fi
#else
#define MAY_LOSE(k)
#endif

#define END_ACCESS(k) reader[k] = ENDED; get[k] = NO_GET; MAY_LOSE(k)
#define FREE(k) write_lease[k] = FREED; pool_owner[PROC(k)] = 0; spoiled[PROC(k)] = 0; abandoned[k] = 0; FORGET(k)

#define READER_STEPS(k, other, t) \
    :: atomic { RUNS(k) && reader[k] == QUIET && opened[t] && !voided[t] && pool_owner[PROC(k)] == 0 -> \
        printf("rank %d (process %d) takes its page for key %d and asks the lender\n", (k) % 2, PROC(k), k); \
        HOLDS(PAGE_CLAIM, ALL_WITH(CLEAR_OF, k)); \
        pool_owner[PROC(k)] = (k) + 1; write_lease[k] = TAKEN; reader[k] = ASKED } \
    :: atomic { RUNS(k) && reader[k] == ASKED && HAS_GRANT(k) -> \
        reader[k] = READING; get[k] = POSTED; NOTE_BEFORE(k); \
        printf("rank %d has the grant of key %d and posts its get\n", (k) % 2, k) } \
    :: atomic { RUNS(k) && reader[k] == ASKED -> \
        printf("rank %d gives key %d up before it had a grant, and says so\n", (k) % 2, k); END_ACCESS(k) } \
    :: atomic { RUNS(k) && reader[k] == READING && MOVING(k) -> reader[k] = CANCELLED; \
        printf("rank %d cancels key %d; its get is still out\n", (k) % 2, k) } \
    :: atomic { RUNS(k) && reader[k] == READING && get[k] == LANDED -> \
        if \
        :: UNCHANGED(k) -> \
            printf("rank %d reads the generation of key %d again: unchanged, delivers, says access ended\n", (k) % 2, k); \
            HOLDS(BYTES_CLAIM, RIGHT_BYTES(k)); \
            delivered[k] = 1 \
        :: else -> \
            printf("rank %d reads the generation of key %d again: changed, delivers nothing, says access ended\n", (k) % 2, k) \
        fi; \
        END_ACCESS(k) } \
    :: atomic { RUNS(k) && reader[k] == CANCELLED && get[k] == LANDED -> \
        printf("rank %d sees its cancelled get of key %d end, says access ended\n", (k) % 2, k); END_ACCESS(k) } \
    :: atomic { RUNS(k) && HAS_RESULT(k) && write_lease[k] == TAKEN && !abandoned[k] && !voided[t] -> abandoned[k] = 1; \
        printf("rank %d stops waiting for the decision on key %d\n", (k) % 2, k) } \
    :: atomic { RUNS(k) && HAS_RESULT(k) && settled[t] && write_lease[k] == TAKEN && !abandoned[k] -> \
        applied[k] = !voided[t]; \
        if \
        :: kept[t] -> write_lease[k] = APPLIED; printf("rank %d applies the settling of key %d\n", (k) % 2, k) \
        :: else -> printf("rank %d applies the settling of key %d: its page is free\n", (k) % 2, k); FREE(k) \
        fi } \
    :: atomic { RUNS(k) && MAY_SHOW(t) && write_lease[k] == APPLIED && !voided[t] -> write_lease[k] = VISIBLE; \
        printf("rank %d makes the page of key %d visible\n", (k) % 2, k); \
        HOLDS(BYTES_CLAIM, RIGHT_BYTES(k)) } \
    :: atomic { RUNS(k) && write_lease[k] == VISIBLE -> \
        printf("rank %d has used the page of key %d and evicts it\n", (k) % 2, k); \
        HOLDS(BYTES_CLAIM, RIGHT_BYTES(k)); \
        FREE(k) } \
    :: atomic { RUNS(k) && voided[t] && HAS_RESULT(k) && \
        (write_lease[k] == APPLIED || (write_lease[k] == TAKEN && (!settled[t] || abandoned[k]))) -> \
        printf("rank %d applies the voiding of key %d: its page is free\n", (k) % 2, k); FREE(k) }

proctype Readers() {
end:
    do
    EACH_KEY(READER_STEPS)
    od
}

#define LAND(k, half) \
    spoiled[PROC(k)] = spoiled[PROC(k)] || pool_owner[PROC(k)] != (k) + 1 || half[page[k]] != WANTED(k)
#define GET_STEPS(k, other, t) \
    :: atomic { get[k] == POSTED -> LAND(k, left_half); get[k] = HALF_LANDED; \
        printf("the left half of page %d lands for key %d\n", page[k], k) } \
    :: atomic { get[k] == HALF_LANDED -> LAND(k, right_half); get[k] = LANDED; \
        printf("the right half of page %d lands for key %d\n", page[k], k) }

proctype Wires() {
end:
    do
    EACH_KEY(GET_STEPS)
    od
}

/* ---- agreement of the destination's members ---------------------------------------------------------------------- */

#define COORDINATOR_STEPS(t, a, b) \
    :: atomic { opened[t] && !settled[t] && !voided[t] && HAS_RESULT(a) && HAS_RESULT(b) -> \
        settled[t] = 1; kept[t] = delivered[a] && delivered[b]; delivered[a] = 0; delivered[b] = 0; \
        printf("coordinator settles transfer %d\n", t) } \
    :: atomic { settled[t] && !voided[t] && !confirmed[t] && applied[a] && applied[b] -> confirmed[t] = 1; \
        applied[a] = 0; applied[b] = 0; \
        printf("coordinator knows that all have applied transfer %d\n", t) } \
    :: atomic { opened[t] && !voided[t] && !confirmed[t] && (abandoned[a] || abandoned[b] || !RUNS(a) || !RUNS(b)) -> \
        printf("coordinator voids transfer %d\n", t); \
        HOLDS(NAMES_CLAIM, write_lease[a] != VISIBLE && write_lease[b] != VISIBLE); \
        voided[t] = 1; applied[a] = 0; applied[b] = 0; delivered[a] = 0; delivered[b] = 0 }

proctype Coordinator() {
end:
    do
    EACH_TRANSFER(COORDINATOR_STEPS)
#if TRANSFERS == 2
    :: atomic { !opened[1] && (settled[0] || voided[0]) -> opened[1] = 1; rank0_restarted = (process[1] != ABSENT);
        printf("coordinator opens transfer 1; for rank 0 it names process %d\n", rank0_restarted) }
#endif
    od
}

/* ---- deaths and restarts ----------------------------------------------------------------------------------------- */

/* What the kernel does: the gets of a dead process are over, and so is its pool. */
#define BURY(k, i) \
    if :: PROC(k) == (i) && write_lease[k] != UNTAKEN -> get[k] = NO_GET; write_lease[k] = FREED; \
          if :: reader[k] < ENDED -> reader[k] = GONE :: else fi; FORGET(k) \
       :: else fi;
#define GET_OF(k, p, i) (PROC(k) == (i) && MOVING(k))

#if TRANSFERS == 2
#define BURY_ALL(i) BURY(0, i) BURY(1, i) BURY(2, i) BURY(3, i)
#else
#define BURY_ALL(i) BURY(0, i) BURY(1, i)
#endif

#define PROCESS_STEPS(i) \
    :: atomic { process[i] == UP && crashes < CRASHES && ANY3(GET_OF, 0, i) -> process[i] = EXITING; crashes++; \
        printf("process %d crashes; a thread of it may still copy\n", i) } \
    :: atomic { process[i] == EXITING || (process[i] == UP && crashes < CRASHES && !ANY3(GET_OF, 0, i)) -> \
        if :: process[i] == UP -> crashes++; printf("process %d crashes\n", i) :: else fi; \
        process[i] = DEAD; BURY_ALL(i) pool_owner[i] = 0; spoiled[i] = 0; \
        printf("nothing of process %d runs any more\n", i) }

proctype Hosts() {
end:
    do
    EACH_PROCESS(PROCESS_STEPS)
    :: atomic { process[0] >= EXITING && process[1] == ABSENT -> process[1] = UP;
        printf("rank 0 starts again, as process 1 under a new epoch\n") }
    od
}

/* Steps of somebody else, for ever: without fairness nothing here would ever have to happen. */
#ifdef LIVE
proctype Elsewhere() {
    do
    :: skip; skip
    od
}
ltl everything_returns { <>[] NOTHING_LENT }
#else
/* No step is left: whatever is lent now stays so. */
proctype Rest() {
end:
    atomic { timeout -> HOLDS(RETURN_CLAIM, NOTHING_LENT) }
}
#endif

init {
    atomic {
        process[0] = UP; process[2] = UP;
        left_half[0] = TAG(0, 2); right_half[0] = TAG(0, 2);
        left_half[1] = TAG(1, 2); right_half[1] = TAG(1, 2);
        opened[0] = 1;
        run Lender(); run Readers(); run Wires(); run Coordinator(); run Hosts();
#ifdef LIVE
        run Elsewhere()
#else
        run Rest()
#endif
    }
}
