/* Views, marks, keys and certificates: the core of cgd's membership protocol, for the model checker Spin.

   `make model` checks it, docs/model.md describes the results. The code is in src/cgd/secagg: membership.py (views),
   positions.py and view_change.py (reports, transfers), certificates.py (certificates, pending reveals), group.py (when
   a pending reveal is written), secure_sum.py (rules 4 and 5). A mark is a pending reveal in the code.

   MODELLED
   - N honest members (0, 1, ...) and one adversary, which is a member of every group and has no process of its own: its
     actions are choices of the moment at which an honest member continues. It withholds a message if a member never
     continues; it sends it to one member only if only that one continues; it starts a new view at any moment; it has
     every signature and every key that an honest member ever sent; it sends a certificate to any member, in any view.
   - One sum, at index 1 of the history. (A member has finished the sum at index 0, or is new or wiped and has no
     history.)
   - A view is identified by the incarnations of its members and a key of the adversary. A member in a view reports the
     number and the history of its finished sums, and its mark. Members may be in different views at the same time, stay
     in an old one while others are in a new one, and visit views in a different order if the adversary sends its keys in
     a different order. No member visits a view twice.
   - Gathered: a member that has the first reports of all members announces it. No member does anything in a view before
     all have announced it.
   - Second reports: a member that accepted a transfer of the sum reports it in the same view. Others may receive that
     late, or not at all.
   - The adversary's first report is one bit, the same for all members: whether it has finished the sum. It is decided
     when the first member uses it.
   - One attempt at the sum in each view, so an attempt has the number of its view. Its steps: Ready; agreed (all are
     ready; Confirm is sent); revealed (all have confirmed; the mark is written and the key is sent); finished (all keys
     were received).
   - Durable state: finished sums and the mark. All other state is lost when a member is killed.
   - Epochs: a list of groups of honest members. Each member enters the next epoch at its own time.

   NOT MODELLED
   - Numbers. A total is identified by its attempt: the adversary chooses its addend again in every attempt. If it sends
     different statements to two members within one attempt, the digests in the Confirms differ and no key is revealed.
     Masked vectors: the adversary may have all of them when it sends Ready, since their first slices follow the Ready of
     their members. It reads nothing without all keys, and of these the model has the steps.
   - Forged signatures and guessed keys. Messages between honest members are neither lost nor forged, but may be late.
   - Other reports of the adversary. It never objects to its own certificates, and a report that does only delays
     others, as does a report of more finished sums than at first.
   - Steps without effect: agreed and Confirm are one step, and so are writing the mark and revealing the key. A kill
     between them is equivalent to a kill after them, with others that do not use it.

   BOUNDS (set by -D)
   N      honest members (2)             VIEWS  views, and so attempts, in the whole run (3)
   KILLS  kills that keep durable state (1)         WIPES  kills that lose all state (0)
   FIRST, SECOND, THIRD   the honest members in each epoch, as bit masks: 3 is {0, 1}, 7 is {0, 1, 2}, 0 is no epoch
          (one epoch with all N members)
   NEW    the members that start without history, a bit mask (0)
   PLACE  the index of the sum in the history (1); 0: it is the first, and no member has a history

   SWITCHES, each of which removes a rule
   FINDING2            a member that claims to have finished the sum is not checked, and may send everyone another total
   NO_GATHERED         a member continues with the reports that it has: others may have left the view meanwhile, and may
                       have another first report of the adversary
   LATE_TAKEOVER       a sum is accepted even if it was not claimed in a first report: also by a member that is ready to
                       run it in the same view, and continues to run it
   GUEST_TAKEOVER      a member that has not revealed its key in an attempt accepts it although those that have may
                       repeat it
   NO_MARK_COMPARISON  other members' marks of other attempts are no objection to an attempt
   NO_OWN_COMPARISON   our own mark of another attempt is no objection
   NO_MARK_MEMBERS     a mark does not restrict its member to the members of the attempt
   LATER_EPOCH         a sum of a later epoch than ours is accepted

   CLAIMS, instead of the two invariants
   REACH             "no sum is ever finished by all": must be wrong, or the invariants hold for lack of sums
   REACH_TAKEOVER    "no sum is ever transferred": must be wrong
   REACH_GUEST       "no sum is ever transferred to a member that was not one of its members": must be wrong
   REACH_RERUN       "no sum is ever finished after an earlier attempt was revealed": must be wrong
   WEDGE             "no member has finished an attempt to which another one's mark objects": such a mark prevents its
                     member forever from accepting the other's sum. It is true as long as the members stay the same

   With TABLE the model checks nothing and prints the values of its conditions; tests/test_model.py compares them with
   those of the code. */

#ifndef N
#define N 2
#endif
#ifndef VIEWS
#define VIEWS 3
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef WIPES
#define WIPES 0
#endif
#ifndef FIRST
#define FIRST ((1 << N) - 1)
#endif
#ifndef SECOND
#define SECOND 0
#endif
#ifndef THIRD
#define THIRD 0
#endif
#ifndef NEW
#define NEW 0
#endif
#ifndef PLACE
#define PLACE 1
#endif

#define BIT(i)      (1 << (i))
#define GROUP(e)    ((e) == 0 -> FIRST : ((e) == 1 -> SECOND : ((e) == 2 -> THIRD : 0))) /* honest members of an epoch */
#define DONE        (PLACE + 1)                       /* the length of a history with the sum */

typedef View {
  byte epoch;
  byte members;   /* those of the epoch, a bit mask, as are: */
  byte here;      /* members that have entered it and reported */
  byte gathered;  /* members that have all reports */
  byte claimed;   /* to which members the adversary first reported that it has finished the sum, if that mattered */
  byte ready;     /* members that have sent Ready */
  byte agreed;    /* members that have all Readies, and have sent Confirm */
  byte revealed;  /* members that have all Confirms, have written their mark and revealed their key */
  byte incarnation[N];   /* of every member in this view */
  byte length[N]; /* first reports: finished sums */
  byte head[N];   /* first reports: the attempt that finished the sum, if it is finished; index 0 is the same for all */
  byte mark[N];   /* first reports: the attempt of the mark; 0: none */
  byte took[N];   /* second reports: the attempt that was accepted in this view; 0: none */
};

View view[VIEWS + 1]; /* view[0] is none */
byte views;           /* the number of views */
byte kills = KILLS;
byte wipes = WIPES;

/* Of every honest member: */
byte incarnation[N] = 1;
byte epoch[N];
byte at[N];           /* its view; 0: none */
bool past[N];         /* durable: whether it has finished the sum at index 0 */
byte done[N];         /* durable: the attempt with which it has finished the sum; 0: it has not */
byte mark[N];         /* durable: the attempt of its mark; 0: none */

#define LENGTH(i)   (done[i] -> DONE : (past[i] -> PLACE : 0))
#define MEMBER(i,v) ((view[v].members & BIT(i)) != 0)
#define ALL(v,what) ((view[v].what & view[v].members) == view[v].members)
#define OPEN(t)     (view[t].members && ALL(t, revealed))              /* the adversary has all keys, and so a certificate, of attempt t */

/* SOME(condition, v, i, t): it is true of some honest member j in view v, other than i. */
#define OTHER(condition, v, i, j, t) (i != j && MEMBER(j, v) && condition(v, i, j, t))
#if N == 3
#define SOME(condition, v, i, t) (OTHER(condition, v, i, 0, t) || OTHER(condition, v, i, 1, t) || OTHER(condition, v, i, 2, t))
#else
#define SOME(condition, v, i, t) (OTHER(condition, v, i, 0, t) || OTHER(condition, v, i, 1, t))
#endif

/* The conditions that are also in the code; see TABLE. */

/* certificates.find_objections: a report objects to attempt t. */
#ifdef NO_MARK_COMPARISON
#define LEFT_BEHIND(mark, t) false
#else
#define LEFT_BEHIND(mark, t) ((mark) != 0 && (mark) != (t))
#endif
#ifdef GUEST_TAKEOVER
#define UNFINISHED(mark, took_part) false
#else
#define UNFINISHED(mark, took_part) ((mark) != 0 && !(took_part))
#endif
#define AGAINST(length, head, mark, took_part, t, signer) \
  ((length) > PLACE \
     -> (length) == PLACE + 1 && (head) != (t) \
      : (((length) == PLACE && (LEFT_BEHIND(mark, t) || UNFINISHED(mark, took_part))) || ((length) != 0 && !(signer))))

/* Group._check_pending_reveal: a member with this mark (0: none) may take part in the sum with these members. */
#ifdef NO_MARK_MEMBERS
#define MAY_ENTER(m, group) true
#else
#define MAY_ENTER(m, group) (!(m) || view[m].members == (group))
#endif

/* ViewChange._find_objections: member i, in view v with all reports, receives the certificate of attempt t. A member
   that accepted the same in this view does not object to it any more, once its second report was received. */
#define HOLDS(v, j, t)  ((view[v].length[j] == DONE && view[v].head[j] == (t)) || view[v].took[j] == (t))
#define TOOK_PART(i, t) (LENGTH(i) == PLACE && mark[i] == (t))
#define REPORT_AGAINST(v, i, j, t) (view[v].took[j] != (t) && \
  AGAINST(view[v].length[j], view[v].head[j], view[v].mark[j], TOOK_PART(i, t), t, MEMBER(j, t)))
#define STRANGE(v, i, j, t) (!MEMBER(j, t) && !HOLDS(v, j, t))
#ifdef NO_OWN_COMPARISON
#define OWN_AGAINST(i, t) false
#else
#define OWN_AGAINST(i, t) (MEMBER(i, t) && LENGTH(i) == PLACE && mark[i] != 0 && mark[i] != (t))
#endif
#define ACCEPTS(v, i, t) \
  (!OWN_AGAINST(i, t) && !SOME(REPORT_AGAINST, v, i, t) \
   && (LENGTH(i) == 0 || MEMBER(i, t) || !SOME(STRANGE, v, i, t)))

/* Conditions of views. */

/* PositionReports.agreed: a member may continue in this view. */
#ifdef NO_GATHERED
#define SETTLED(v) ALL(v, here)
#else
#define SETTLED(v) (ALL(v, here) && ALL(v, gathered))
#endif

/* PositionReports.max_length: in a view in which a first report claimed the sum, it is accepted and not run; in any
   other view it is run and not accepted. */
#define IS_AHEAD(v, i, j, t) (view[v].length[j] == DONE)
#define SOMEBODY_AHEAD(v, i) SOME(IS_AHEAD, v, i, 0)
#ifdef NO_GATHERED /* the adversary has reported to this member only */
#define INFORMED(v, i)  BIT(i)
#else
#define INFORMED(v, i)  view[v].members
#endif
#ifdef LATE_TAKEOVER
#define MAY_TAKE(v, i) true
#else
#define MAY_TAKE(v, i) (SOMEBODY_AHEAD(v, i) || !(view[v].ready & INFORMED(v, i)))
#endif
#define MAY_RUN(v, i) (!SOMEBODY_AHEAD(v, i) && !(view[v].claimed & BIT(i)))

/* JournalTransfer: whether a sum of this epoch is accepted. */
#ifdef LATER_EPOCH
#define KNOWN_EPOCH(i, t) true
#else
#define KNOWN_EPOCH(i, t) (view[t].epoch <= epoch[i])
#endif

/* The invariants. */

#define TWO(i, j)  (done[i] && done[j] && done[i] != done[j])
#define WEDGED(i, j) (done[i] && !done[j] && OWN_AGAINST(j, done[i]))
#define SPLIT(s, t) (OPEN(s) && OPEN(t) && view[s].members != view[t].members)

inline invariants() {
#if defined(REACH)
#if N == 3
  assert(!(done[0] && done[1] && done[2]))
#else
  assert(!(done[0] && done[1]))
#endif
#elif defined(REACH_TAKEOVER) || defined(REACH_GUEST) || defined(REACH_RERUN)
  skip /* asserted where it occurs */
#elif defined(WEDGE)
  assert(!WEDGED(0, 1) && !WEDGED(1, 0));
#if N == 3
  assert(!WEDGED(0, 2) && !WEDGED(2, 0) && !WEDGED(1, 2) && !WEDGED(2, 1))
#endif
#else
  /* 1. One total for a sum. */
  assert(!TWO(0, 1));
#if N == 3
  assert(!TWO(0, 2) && !TWO(1, 2));
#endif
  /* 2. No two attempts at a sum are revealed over different honest members. */
#if VIEWS >= 2
  assert(!SPLIT(1, 2));
#endif
#if VIEWS >= 3
  assert(!SPLIT(1, 3) && !SPLIT(2, 3));
#endif
#if VIEWS >= 4
  assert(!SPLIT(1, 4) && !SPLIT(2, 4) && !SPLIT(3, 4));
#endif
#if VIEWS >= 5
#error "add the views to SPLIT, ENTER and TAKE"
#endif
#endif
}

/* The actions of a member. */

inline report(i, v) { /* enter view v and report to all */
  view[v].here = view[v].here | BIT(i);
  view[v].length[i] = LENGTH(i);
  view[v].head[i] = done[i];
  view[v].mark[i] = mark[i];
  at[i] = v
}

inline found(i) { /* a view with a new key of the adversary */
  views++;
  view[views].epoch = epoch[i];
  view[views].members = GROUP(epoch[i]);
  view[views].incarnation[0] = incarnation[0];
  view[views].incarnation[1] = incarnation[1];
#if N == 3
  view[views].incarnation[2] = incarnation[2];
#endif
  report(i, views)
}

#if N == 3
#define NOT_OLDER(v, w) (view[v].incarnation[0] >= view[w].incarnation[0] && view[v].incarnation[1] >= view[w].incarnation[1] \
                         && view[v].incarnation[2] >= view[w].incarnation[2])
#else
#define NOT_OLDER(v, w) (view[v].incarnation[0] >= view[w].incarnation[0] && view[v].incarnation[1] >= view[w].incarnation[1])
#endif
/* A view of others that it has not visited. It does not return to older incarnations of others than it knows. */
#define MAY_JOIN(i, v) (v <= views && view[v].epoch == epoch[i] && MEMBER(i, v) && !(view[v].here & BIT(i)) \
                        && view[v].incarnation[i] == incarnation[i] && NOT_OLDER(v, at[i]))

inline finish(i, t) {
  done[i] = t;
  past[i] = true;
  mark[i] = 0
}

inline take_over(i, t) { /* accept the transfer, and report again */
  if
  :: SOMEBODY_AHEAD(at[i], i)
  :: else -> view[at[i]].claimed = view[at[i]].claimed | INFORMED(at[i], i)
  fi;
  view[at[i]].took[i] = t;
  finish(i, t);
#if defined(REACH_TAKEOVER)
  assert(false);
#elif defined(REACH_GUEST)
  assert(t >= 254 || MEMBER(i, t));
#endif
  invariants()
}

#define MAY_CATCH_UP(i) (at[i] && !done[i] && SETTLED(at[i]) && MAY_TAKE(at[i], i))
#define ENTER(v) :: atomic { MAY_JOIN(_pid, v) -> report(_pid, v) }
#define TAKE(t) \
  :: atomic { OPEN(t) && at[_pid] != t && MAY_CATCH_UP(_pid) && KNOWN_EPOCH(_pid, t) && ACCEPTS(at[_pid], _pid, t) -> \
       take_over(_pid, t) }

#ifndef TABLE
active [N] proctype member() {
  past[_pid] = !(NEW & BIT(_pid));
  do
  /* Views: a new one, or one of others. */
  :: atomic { views < VIEWS && (GROUP(epoch[_pid]) & BIT(_pid)) -> found(_pid) }
  ENTER(1)
#if VIEWS >= 2
  ENTER(2)
#endif
#if VIEWS >= 3
  ENTER(3)
#endif
#if VIEWS >= 4
  ENTER(4)
#endif
#ifndef NO_GATHERED
  :: atomic { at[_pid] && ALL(at[_pid], here) && !(view[at[_pid]].gathered & BIT(_pid)) ->
       view[at[_pid]].gathered = view[at[_pid]].gathered | BIT(_pid) }
#endif

  /* The sum. No member is known to be ahead: it is ready. A member without history has received index 0 by now. */
  :: atomic { at[_pid] && !done[_pid] && SETTLED(at[_pid]) && !(view[at[_pid]].ready & BIT(_pid)) &&
              MAY_RUN(at[_pid], _pid) && MAY_ENTER(mark[_pid], view[at[_pid]].members) ->
       past[_pid] = true;
       view[at[_pid]].ready = view[at[_pid]].ready | BIT(_pid) }
  :: atomic { at[_pid] && ALL(at[_pid], ready) && !(view[at[_pid]].agreed & BIT(_pid)) ->
       view[at[_pid]].agreed = view[at[_pid]].agreed | BIT(_pid) }
  :: atomic { at[_pid] && ALL(at[_pid], agreed) && !(view[at[_pid]].revealed & BIT(_pid)) ->
       view[at[_pid]].revealed = view[at[_pid]].revealed | BIT(_pid);
       if
       :: !done[_pid] -> mark[_pid] = at[_pid]
       :: else /* LATE_TAKEOVER: the mark is of the next index, which is not modelled */
       fi;
       invariants() }
  :: atomic { at[_pid] && !done[_pid] && OPEN(at[_pid]) && mark[_pid] == at[_pid] ->
       finish(_pid, at[_pid]);
#ifdef REACH_RERUN
       assert(!(OPEN(1) && at[_pid] > 1));
#endif
       invariants() }

  /* Transfers. */
  TAKE(1)
#if VIEWS >= 2
  TAKE(2)
#endif
#if VIEWS >= 3
  TAKE(3)
#endif
#if VIEWS >= 4
  TAKE(4)
#endif
#ifdef FINDING2
  :: atomic { MAY_CATCH_UP(_pid) -> take_over(_pid, 254) }
  :: atomic { MAY_CATCH_UP(_pid) -> take_over(_pid, 255) }
#endif

  /* Kills and epochs. */
  :: atomic { kills && at[_pid] -> kills--; incarnation[_pid]++; at[_pid] = 0 }
  :: atomic { wipes && at[_pid] -> wipes--; incarnation[_pid]++; at[_pid] = 0;
       past[_pid] = false; done[_pid] = 0; mark[_pid] = 0 }
  :: atomic { GROUP(epoch[_pid] + 1) -> epoch[_pid]++; at[_pid] = 0 }
  od
}
#else

/* The conditions for all values of their parameters: a line has these and, last, the value. */
byte one, two, three, four, five, six;

#define FOR(what, from, to) for (what : from .. to)

init {
  d_step {
    FOR(one, 0, 3) { FOR(two, 1, 2) { FOR(three, 0, 2) { FOR(four, 0, 1) { FOR(five, 0, 1) {
      printf("AGAINST %d %d %d %d %d %d\n", one, two, three, four, five, (AGAINST(one, two, three, four, 1, five) -> 1 : 0))
    } } } } }

    FOR(one, 0, 1) { FOR(two, 1, 7) { FOR(three, 1, 7) {
      view[1].members = two;
      printf("MAY_ENTER %d %d %d %d\n", one, two, three, (MAY_ENTER(one, three) -> 1 : 0))
    } } }

    view[2].members = 3;
    view[2].here = 3;
    FOR(one, 1, 3) { FOR(two, 0, 2) { FOR(three, 0, 1) { FOR(four, 0, 2) { FOR(five, 0, 2) { FOR(six, 1, 2) {
      view[1].members = one;
      mark[0] = two;
      past[0] = three;
      view[2].length[1] = four;
      view[2].mark[1] = five;
      view[2].head[1] = six;
      printf("ACCEPTS %d %d %d %d %d %d %d\n", one, two, three, four, five, six, (ACCEPTS(2, 0, 1) -> 1 : 0))
    } } } } } }
  }
}
#endif
