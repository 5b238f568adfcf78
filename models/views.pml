/* Views, marks, keys and certificates: the core of cgd's protocol, for the model checker Spin.

   `make model` checks it, docs/model.md tells what was found. The code is in src/cgd/protocol: assembly.py (views),
   catching_up.py (reports, takeovers), history.py (certificates, marks, reruns), group.py (when a mark is written),
   secure_sum.py (rules 4 and 5).

   WHAT IS MODELLED
   - N honest members (0, 1, ...) and one liar, who is a member of every group and has no process of its own: whatever
     it can do is a choice of the moment at which an honest member goes on. It withholds a message by letting a member
     never go on; it sends it to one and not to the other by letting only one go on; it starts a new view at any
     moment; it holds every signature and every key that ever left an honest member; it gives a certificate to
     whomever it likes, in any view.
   - One sum, at place 1 of the history. (A member has the sum at place 0 behind it, or is new or wiped and has nothing.)
   - A view is named by the lives of its members and a key of the liar. Who is in a view reports once: how many sums it
     has finished, by which history, its mark, and whether that is void, with the evidence. Members may be in different
     views at the same time, stay in an old one while others are in a new one, and visit views in a different order if
     the liar gives its keys in a different order. Nobody visits a view twice.
   - One attempt of the sum in each view, so an attempt has the number of its view. Its steps: Ready, agreed (all are
     ready; a live mark is made void now; Confirm leaves), shown (all have confirmed; the mark is written and the key
     leaves), finished (all keys are here).
   - What is durable: finished sums, the mark, its evidence. The rest is gone when a member is killed.
   - Epochs: a list of groups of honest members. Each member goes to the next epoch at a moment of its own.

   WHAT IS LEFT OUT
   - Numbers. A total is the attempt that it comes from: the liar chooses its addend anew in every attempt. If it tells
     two members different things within one attempt, the digests in the Confirms differ and nobody shows a key.
   - Forged signatures and guessed keys. Messages between honest members are neither lost nor forged, but may be late.
   - The liar's own reports, but for one bit: that it is behind (`lag`). It never speaks against its own certificates.
   - Steps that add nothing: agreed and Confirm are one step, and so are writing the mark and showing the key. To be
     killed between them is to be killed after them, with others that do not make use of it.
   - Second reports of honest members. They can only speak against a certificate, so without them more is accepted.

   BOUNDS (set by -D)
   N      honest members (2)             VIEWS  views, and so attempts, in the whole run (3)
   KILLS  kills that leave what is durable (1)      WIPES  kills that lose everything (0)
   FIRST, SECOND, THIRD   the honest members in each epoch, as bit masks: 3 is {0, 1}, 7 is {0, 1, 2}, 0 is no epoch
          (one epoch with all N members)
   NEW    the members that begin without a past, a bit mask (0)

   SWITCHES, each of which takes a rule away or puts a fault in
   FINDING2          who says that it has finished the sum is believed, and may tell everybody something else
   NO_VOID           to agree to run a sum again does not void the attempt before
   NO_MARK_MEMBERS   a mark does not bind its member to the members of the attempt
   NO_REPORT_DIGEST  the members do not compare what the liar has reported to them
   LATE_TAKEOVER     a member takes a sum over even after it was ready to run it in the same view, and goes on running it
   GUEST_TAKEOVER    who took no part in a sum takes it over although those who did may still run it again

   CLAIMS, instead of the two laws
   REACH             "no sum is ever finished by all": must be wrong, or the laws hold for want of any sum
   REACH_TAKEOVER    "no sum is ever taken over": must be wrong
   REACH_RERUN       "no sum is ever finished after an earlier attempt was void": must be wrong
   WEDGE             "nobody has finished an attempt that another one's mark speaks against": it is wrong (see docs/model.md);
                     with IN_ORDER, all members visit the views in the same order

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

#define BIT(i)      (1 << (i))
#define GROUP(e)    ((e) == 0 -> FIRST : ((e) == 1 -> SECOND : ((e) == 2 -> THIRD : 0))) /* honest members of an epoch */
#define PLACE       1                                 /* of the sum */
#define DONE        2                                 /* the length of a history with it */

typedef View {
  byte epoch;
  byte members;   /* those of the epoch, a bit mask, as are: */
  byte here;      /* who has entered it and reported */
  byte ready;     /* who has said Ready */
  byte agreed;    /* who has all Readies, and has said Confirm */
  byte shown;     /* who has all Confirms, has written its mark and shown its key */
  byte lag;       /* whom the liar has told that it is behind */
  byte life[N];   /* whose life this is a view of */
  byte length[N]; /* reported: finished sums */
  byte head[N];   /* reported: the attempt that finished the sum, if it is finished; the place before is the same for all */
  byte mark[N];   /* reported: the attempt of the mark; 0: none */
  byte rerun[N];  /* reported: the view of the rerun that makes it void; 0: it is live */
};

View view[VIEWS + 1]; /* view[0] is none */
byte views;           /* how many there are */
byte kills = KILLS;
byte wipes = WIPES;

/* Of every honest member: */
byte life[N] = 1;
byte epoch[N];
byte at[N];           /* its view; 0: none */
bool past[N];         /* durable: whether it has finished the sum at place 0 */
byte done[N];         /* durable: the attempt with which it has finished the sum; 0: it has not */
byte mark[N];         /* durable: the attempt of its mark; 0: none */
byte rerun[N];        /* durable: the view of the rerun that voids it; 0: it is live */

#define LENGTH(i)   (done[i] -> DONE : past[i])
#define MEMBER(i,v) ((view[v].members & BIT(i)) != 0)
#define ALL(v,what) ((view[v].what & view[v].members) == view[v].members)
#define OPEN(t)     (view[t].members && ALL(t, shown))              /* the liar has all keys, and so a certificate, of attempt t */

/* The conditions that the code has, too; see TABLE. */

/* history.acceptable: a report speaks against attempt t having finished the sum. */
#define AGAINST(length, head, mark, void, t, signer) \
  ((length) > PLACE \
     -> (length) == PLACE + 1 && (head) != (t) \
      : (((length) == PLACE && (mark) != 0 && ((mark) != (t) || (void))) || ((length) != 0 && !(signer))))

/* history.Rerun.voids: the reports and Readies of view w prove to member i that all agreed to run attempt m again. */
#define LONGER(w, j, m) ((view[m].members & BIT(j)) && view[w].length[j] > PLACE)
#if N == 3
#define ANY_LONGER(w, m) (LONGER(w, 0, m) || LONGER(w, 1, m) || LONGER(w, 2, m))
#else
#define ANY_LONGER(w, m) (LONGER(w, 0, m) || LONGER(w, 1, m))
#endif
#define VOIDS(w, i, m) \
  ((view[w].here & BIT(i)) && (view[m].members & ~(view[w].here & view[w].ready)) == 0 \
   && !ANY_LONGER(w, m) && view[w].mark[i] == (m))

/* Group._check_mark: a member with this mark (0: none) may take part in the sum with these members. */
#ifdef NO_MARK_MEMBERS
#define MAY_ENTER(m, group) true
#else
#define MAY_ENTER(m, group) (!(m) || view[m].members == (group))
#endif

/* Takeovers. Member i, in view v with all reports, is given the certificate of attempt t. */
#define REPORT_AGAINST(v, j, t) (MEMBER(j, v) && \
  AGAINST(view[v].length[j], view[v].head[j], view[v].mark[j], view[v].rerun[j], t, MEMBER(j, t)))
#define OWN_AGAINST(i, t) AGAINST(LENGTH(i), done[i], mark[i], rerun[i], t, MEMBER(i, t))
#define HOLDS(v, j, t)  (view[v].length[j] == DONE && view[v].head[j] == (t))
#define LACKS(v, i, j, t) (i != j && MEMBER(j, v) && MEMBER(j, t) && !HOLDS(v, j, t))
#define STRANGE(v, i, j, t) (i != j && MEMBER(j, v) && !MEMBER(j, t) && !HOLDS(v, j, t))
#if N == 3
#define SOMEBODY_AGAINST(v, i, t) ((i != 0 && REPORT_AGAINST(v, 0, t)) || (i != 1 && REPORT_AGAINST(v, 1, t)) \
                                   || (i != 2 && REPORT_AGAINST(v, 2, t)))
#define SOMEBODY_LACKS(v, i, t) (LACKS(v, i, 0, t) || LACKS(v, i, 1, t) || LACKS(v, i, 2, t))
#define SOMEBODY_STRANGE(v, i, t) (STRANGE(v, i, 0, t) || STRANGE(v, i, 1, t) || STRANGE(v, i, 2, t))
#define LONGER_HERE(v, j) (MEMBER(j, v) && view[v].length[j] == DONE)
#define SOMEBODY_AHEAD(v) (LONGER_HERE(v, 0) || LONGER_HERE(v, 1) || LONGER_HERE(v, 2))
#else
#define SOMEBODY_AGAINST(v, i, t) ((i != 0 && REPORT_AGAINST(v, 0, t)) || (i != 1 && REPORT_AGAINST(v, 1, t)))
#define SOMEBODY_LACKS(v, i, t) (LACKS(v, i, 0, t) || LACKS(v, i, 1, t))
#define SOMEBODY_STRANGE(v, i, t) (STRANGE(v, i, 0, t) || STRANGE(v, i, 1, t))
#define LONGER_HERE(v, j) (MEMBER(j, v) && view[v].length[j] == DONE)
#define SOMEBODY_AHEAD(v) (LONGER_HERE(v, 0) || LONGER_HERE(v, 1))
#endif

#ifdef GUEST_TAKEOVER /* as CatchingUp._speaks_against has it */
#define ACCEPTS(v, i, t) \
  ((past[i] && !MEMBER(i, t) && !mark[i]) -> !SOMEBODY_STRANGE(v, i, t) \
                                          : !OWN_AGAINST(i, t) && !SOMEBODY_AGAINST(v, i, t))
#else /* who took no part waits until all who did hold the sum: nobody runs it again then */
#define ACCEPTS(v, i, t) \
  (MEMBER(i, t) -> !OWN_AGAINST(i, t) && !SOMEBODY_AGAINST(v, i, t) : !SOMEBODY_LACKS(v, i, t))
#endif

#ifdef LATE_TAKEOVER /* only if the liar said that it was behind: else the view is settled */
#define MAY_TAKE(v, i) (!(view[v].ready & BIT(i)) || (view[v].lag & BIT(i)))
#else
#define MAY_TAKE(v, i) (!(view[v].ready & BIT(i)))
#endif

#ifdef NO_REPORT_DIGEST
#define SAME_REPORTS(v) true
#else
#define SAME_REPORTS(v) (view[v].lag == 0 || view[v].lag == view[v].members)
#endif

/* The laws. */

#define TWO(i, j)  (done[i] && done[j] && done[i] != done[j])
#define WEDGED(i, j) (done[i] && !done[j] && mark[j] && OWN_AGAINST(j, done[i]))
#define SPLIT(s, t) (OPEN(s) && OPEN(t) && view[s].members != view[t].members)

inline laws() {
#if defined(REACH)
#if N == 3
  assert(!(done[0] && done[1] && done[2]))
#else
  assert(!(done[0] && done[1]))
#endif
#elif defined(REACH_TAKEOVER) || defined(REACH_RERUN)
  skip /* where it happens */
#elif defined(WEDGE)
  assert(!WEDGED(0, 1) && !WEDGED(1, 0));
#if N == 3
  assert(!WEDGED(0, 2) && !WEDGED(2, 0) && !WEDGED(1, 2) && !WEDGED(2, 1))
#endif
#else
  /* 1. One total for a step. */
  assert(!TWO(0, 1));
#if N == 3
  assert(!TWO(0, 2) && !TWO(1, 2));
#endif
  /* 2. No two openings of a sum over different honest members. */
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

/* What a member does. */

inline report(i, v) { /* it is in view v now, and tells all where it stands */
  view[v].here = view[v].here | BIT(i);
  view[v].length[i] = LENGTH(i);
  view[v].head[i] = done[i];
  view[v].mark[i] = mark[i];
  view[v].rerun[i] = rerun[i];
  at[i] = v
}

inline found(i) { /* a view with a new key of the liar */
  views++;
  view[views].epoch = epoch[i];
  view[views].members = GROUP(epoch[i]);
  view[views].life[0] = life[0];
  view[views].life[1] = life[1];
#if N == 3
  view[views].life[2] = life[2];
#endif
  report(i, views)
}

#if N == 3
#define NOT_OLDER(v, w) (view[v].life[0] >= view[w].life[0] && view[v].life[1] >= view[w].life[1] \
                         && view[v].life[2] >= view[w].life[2])
#else
#define NOT_OLDER(v, w) (view[v].life[0] >= view[w].life[0] && view[v].life[1] >= view[w].life[1])
#endif
#ifdef IN_ORDER
#define IN_TURN(v, w) (v > w)
#else
#define IN_TURN(v, w) true
#endif
/* A view of others that it has not been in. It does not go back to older lives of others than it knows. */
#define MAY_JOIN(i, v) (v <= views && view[v].epoch == epoch[i] && MEMBER(i, v) && !(view[v].here & BIT(i)) \
                        && view[v].life[i] == life[i] && NOT_OLDER(v, at[i]) && IN_TURN(v, at[i]))

inline hear(i, j) { /* the evidence that came with a report */
  if
  :: mark[i] && !rerun[i] && MEMBER(j, at[i]) && view[at[i]].rerun[j] && VOIDS(view[at[i]].rerun[j], i, mark[i]) ->
       rerun[i] = view[at[i]].rerun[j]
  :: else
  fi
}

inline weigh(i) { /* all reports are here: Group.void_mark */
#ifndef NO_VOID
  hear(i, 0);
  hear(i, 1);
#if N == 3
  hear(i, 2);
#endif
#endif
  skip
}

inline finish(i, t) {
  done[i] = t;
  past[i] = true;
  mark[i] = 0;
  rerun[i] = 0
}

#define ENTER(v) :: atomic { MAY_JOIN(_pid, v) -> report(_pid, v) }
/* `weigh` comes first: what it finds may speak against the certificate. */
#define TAKE(t) \
  :: atomic { OPEN(t) && at[_pid] && at[_pid] != t && !done[_pid] && ALL(at[_pid], here) && MAY_TAKE(at[_pid], _pid) \
              && ACCEPTS(at[_pid], _pid, t) -> \
       weigh(_pid); \
       if \
       :: ACCEPTS(at[_pid], _pid, t) -> finish(_pid, t); taken(); laws() \
       :: else \
       fi }
/* The liar has the Readies of all in view w, and so the proof of a rerun, even if nobody was agreed. */
#define PROVE(w) \
  :: atomic { w <= views && at[_pid] && at[_pid] != w && ALL(at[_pid], here) && mark[_pid] && !rerun[_pid] \
              && VOIDS(w, _pid, mark[_pid]) -> rerun[_pid] = w }

inline taken() {
#ifdef REACH_TAKEOVER
  assert(false);
#endif
  skip
}

#ifndef TABLE
active [N] proctype member() {
  past[_pid] = !(NEW & BIT(_pid));
  do
  /* Views: of its own, or of others. */
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

  /* The sum. Nobody that it believes is ahead: it is ready. Who had no past has taken over place 0 by now. */
  :: atomic { at[_pid] && !done[_pid] && ALL(at[_pid], here) && !(view[at[_pid]].ready & BIT(_pid)) &&
              !SOMEBODY_AHEAD(at[_pid]) && MAY_ENTER(mark[_pid], view[at[_pid]].members) ->
       weigh(_pid);
       past[_pid] = true;
       view[at[_pid]].ready = view[at[_pid]].ready | BIT(_pid);
#if defined(LATE_TAKEOVER) || defined(NO_REPORT_DIGEST)
       if /* what the liar has reported to it */
       :: view[at[_pid]].lag = view[at[_pid]].lag | BIT(_pid)
       :: skip
       fi
#endif
     }
  :: atomic { at[_pid] && ALL(at[_pid], ready) && !(view[at[_pid]].agreed & BIT(_pid)) && SAME_REPORTS(at[_pid]) ->
       view[at[_pid]].agreed = view[at[_pid]].agreed | BIT(_pid);
#ifndef NO_VOID
       if
       :: mark[_pid] && !rerun[_pid] -> rerun[_pid] = at[_pid]
       :: else
       fi;
#endif
       laws() }
  :: atomic { at[_pid] && ALL(at[_pid], agreed) && !(view[at[_pid]].shown & BIT(_pid)) ->
       view[at[_pid]].shown = view[at[_pid]].shown | BIT(_pid);
       if
       :: !done[_pid] -> mark[_pid] = at[_pid]; rerun[_pid] = 0
       :: else /* LATE_TAKEOVER: the mark is of the place behind, where nothing is modelled */
       fi;
       laws() }
  :: atomic { at[_pid] && !done[_pid] && OPEN(at[_pid]) && mark[_pid] == at[_pid] ->
       finish(_pid, at[_pid]);
#ifdef REACH_RERUN
       assert(!(OPEN(1) && at[_pid] > 1));
#endif
       laws() }

  /* The past. */
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
  :: atomic { at[_pid] && !done[_pid] && ALL(at[_pid], here) ->
       if
       :: finish(_pid, 254)
       :: finish(_pid, 255)
       fi;
       laws() }
#endif
#ifndef NO_VOID
  PROVE(1)
#if VIEWS >= 2
  PROVE(2)
#endif
#if VIEWS >= 3
  PROVE(3)
#endif
#if VIEWS >= 4
  PROVE(4)
#endif
#endif

  /* Its life. */
  :: atomic { kills && at[_pid] -> kills--; life[_pid]++; at[_pid] = 0 }
  :: atomic { wipes && at[_pid] -> wipes--; life[_pid]++; at[_pid] = 0;
       past[_pid] = false; done[_pid] = 0; mark[_pid] = 0; rerun[_pid] = 0 }
  :: atomic { GROUP(epoch[_pid] + 1) -> epoch[_pid]++; at[_pid] = 0 }
  od
}
#else

/* The conditions, with all values of what they depend on: a line has these and, last, what comes out. */
byte one, two, three, four, five, six;

#define FOR(what, from, to) for (what : from .. to)

init {
  d_step {
    FOR(one, 0, 3) { FOR(two, 1, 2) { FOR(three, 0, 2) { FOR(four, 0, 1) { FOR(five, 0, 1) {
      printf("AGAINST %d %d %d %d %d %d\n", one, two, three, four, five, (AGAINST(one, two, three, four, 1, five) -> 1 : 0))
    } } } } }

    FOR(one, 1, 3) { FOR(two, 0, 3) { FOR(three, 0, 3) { FOR(four, 0, 2) { FOR(five, 0, 2) { FOR(six, 0, 2) {
      view[1].members = one;
      view[2].here = two;
      view[2].ready = three;
      view[2].length[0] = four;
      view[2].length[1] = five;
      view[2].mark[0] = six;
      printf("VOIDS %d %d %d %d %d %d %d\n", one, two, three, four, five, six, (VOIDS(2, 0, 1) -> 1 : 0))
    } } } } } }

    FOR(one, 0, 1) { FOR(two, 1, 7) { FOR(three, 1, 7) {
      view[1].members = two;
      printf("MAY_ENTER %d %d %d %d\n", one, two, three, (MAY_ENTER(one, three) -> 1 : 0))
    } } }

    view[2].members = 3;
    view[2].here = 3;
    FOR(one, 1, 3) { FOR(two, 0, 2) { FOR(three, 0, 3) { FOR(four, 0, 2) { FOR(five, 0, 2) { FOR(six, 0, 1) {
      view[1].members = one;
      mark[0] = two;
      past[0] = three & 1;
      rerun[0] = three >> 1;
      view[2].length[1] = four;
      view[2].head[1] = six + 1;
      view[2].mark[1] = five;
      view[2].rerun[1] = 0;
      printf("ACCEPTS %d %d %d %d %d %d 0 %d\n", one, two, three, four, five, six, (ACCEPTS(2, 0, 1) -> 1 : 0));
      view[2].rerun[1] = 2;
      printf("ACCEPTS %d %d %d %d %d %d 1 %d\n", one, two, three, four, five, six, (ACCEPTS(2, 0, 1) -> 1 : 0))
    } } } } } }
  }
}
#endif
