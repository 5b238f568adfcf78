/* Views, marks, keys and certificates: the core of cgd's protocol, for the model checker Spin.

   `make model` checks it, docs/model.md tells what was found. The code is in src/cgd/protocol: assembly.py (views),
   reports.py and catching_up.py (reports, takeovers), history.py (certificates, marks), group.py (when a mark is
   written), secure_sum.py (rules 4 and 5).

   WHAT IS MODELLED
   - N honest members (0, 1, ...) and one liar, who is a member of every group and has no process of its own: whatever
     it can do is a choice of the moment at which an honest member goes on. It withholds a message by letting a member
     never go on; it sends it to one and not to the other by letting only one go on; it starts a new view at any
     moment; it holds every signature and every key that ever left an honest member; it gives a certificate to
     whomever it likes, in any view.
   - One sum, at place 1 of the history. (A member has the sum at place 0 behind it, or is new or wiped and has nothing.)
   - A view is named by the lives of its members and a key of the liar. Who is in a view reports: how many sums it has
     finished, by which history, and its mark. Members may be in different views at the same time, stay in an old one
     while others are in a new one, and visit views in a different order if the liar gives its keys in a different
     order. Nobody visits a view twice.
   - Gathered: who has the first reports of all says so. Nobody does anything in a view before all have said so.
   - Second reports: who has taken the sum over reports it in the same view. Others may get that late, or not at all.
   - The liar's first report is one bit, the same for all: that it has finished the sum, or that it has not. It is
     decided when the first member makes use of it.
   - One attempt of the sum in each view, so an attempt has the number of its view. Its steps: Ready, agreed (all are
     ready; Confirm leaves), shown (all have confirmed; the mark is written and the key leaves), finished (all keys are
     here).
   - What is durable: finished sums and the mark. The rest is gone when a member is killed.
   - Epochs: a list of groups of honest members. Each member goes to the next epoch at a moment of its own.

   WHAT IS LEFT OUT
   - Numbers. A total is the attempt that it comes from: the liar chooses its addend anew in every attempt. If it tells
     two members different things within one attempt, the digests in the Confirms differ and nobody shows a key.
   - Forged signatures and guessed keys. Messages between honest members are neither lost nor forged, but may be late.
   - What else the liar may report. It never speaks against its own certificates, and a report that does only holds
     others up, as does one that more was finished than at first.
   - Steps that add nothing: agreed and Confirm are one step, and so are writing the mark and showing the key. To be
     killed between them is to be killed after them, with others that do not make use of it.

   BOUNDS (set by -D)
   N      honest members (2)             VIEWS  views, and so attempts, in the whole run (3)
   KILLS  kills that leave what is durable (1)      WIPES  kills that lose everything (0)
   FIRST, SECOND, THIRD   the honest members in each epoch, as bit masks: 3 is {0, 1}, 7 is {0, 1, 2}, 0 is no epoch
          (one epoch with all N members)
   NEW    the members that begin without a past, a bit mask (0)
   PLACE  of the sum in the history (1); 0: it is the first, and nobody has a past

   SWITCHES, each of which takes a rule away
   FINDING2            who says that it has finished the sum is believed, and may tell everybody something else
   NO_GATHERED         a member goes on with the reports that it has: others may have left the view meanwhile, and may
                       have another first report of the liar
   LATE_TAKEOVER       a sum is taken over even if it was not claimed in a first report: also by a member that is ready
                       to run it in the same view, and goes on running it
   GUEST_TAKEOVER      who has not shown its key in an attempt takes it over although those who have may run it again
   NO_MARK_COMPARISON  other members' marks of other attempts do not speak against an attempt
   NO_OWN_COMPARISON   our own mark of another attempt does not
   NO_MARK_MEMBERS     a mark does not bind its member to the members of the attempt
   LATER_EPOCH         a sum of a later epoch than ours is taken over

   CLAIMS, instead of the two laws
   REACH             "no sum is ever finished by all": must be wrong, or the laws hold for want of any sum
   REACH_TAKEOVER    "no sum is ever taken over": must be wrong
   REACH_GUEST       "no sum is ever taken over by one that was no member of it": must be wrong
   REACH_RERUN       "no sum is ever finished after an earlier attempt was opened": must be wrong
   WEDGE             "nobody has finished an attempt that another one's mark speaks against": such a mark keeps its member
                     from taking over what the other has, for ever. It is true as long as the members stay the same

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
  byte here;      /* who has entered it and reported */
  byte gathered;  /* who has had all reports */
  byte claimed;   /* to whom the liar has reported at first that it has finished the sum, if that made a difference */
  byte ready;     /* who has said Ready */
  byte agreed;    /* who has all Readies, and has said Confirm */
  byte shown;     /* who has all Confirms, has written its mark and shown its key */
  byte life[N];   /* whose life this is a view of */
  byte length[N]; /* first reports: finished sums */
  byte head[N];   /* first reports: the attempt that finished the sum, if it is finished; the place before is the same for all */
  byte mark[N];   /* first reports: the attempt of the mark; 0: none */
  byte took[N];   /* second reports: the attempt that was taken over in this view; 0: none */
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

#define LENGTH(i)   (done[i] -> DONE : (past[i] -> PLACE : 0))
#define MEMBER(i,v) ((view[v].members & BIT(i)) != 0)
#define ALL(v,what) ((view[v].what & view[v].members) == view[v].members)
#define OPEN(t)     (view[t].members && ALL(t, shown))              /* the liar has all keys, and so a certificate, of attempt t */

/* SOME(condition, v, i, t): it is true of some honest member j in view v, other than i. */
#define OTHER(condition, v, i, j, t) (i != j && MEMBER(j, v) && condition(v, i, j, t))
#if N == 3
#define SOME(condition, v, i, t) (OTHER(condition, v, i, 0, t) || OTHER(condition, v, i, 1, t) || OTHER(condition, v, i, 2, t))
#else
#define SOME(condition, v, i, t) (OTHER(condition, v, i, 0, t) || OTHER(condition, v, i, 1, t))
#endif

/* The conditions that the code has, too; see TABLE. */

/* history.acceptable: a report keeps us from taking over that attempt t finished the sum. */
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

/* Group._check_mark: a member with this mark (0: none) may take part in the sum with these members. */
#ifdef NO_MARK_MEMBERS
#define MAY_ENTER(m, group) true
#else
#define MAY_ENTER(m, group) (!(m) || view[m].members == (group))
#endif

/* CatchingUp._speaks_against: member i, in view v with all reports, is given the certificate of attempt t. Whoever has
   taken the same over in this view does not speak against it any more, as soon as its second report is here. */
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

/* Those about views. */

/* Reports.settled: a member may go on in this view. */
#ifdef NO_GATHERED
#define SETTLED(v) ALL(v, here)
#else
#define SETTLED(v) (ALL(v, here) && ALL(v, gathered))
#endif

/* Reports.longest: in a view in which somebody has claimed the sum in a first report, it is taken over and not run; in
   any other it is run and not taken over. */
#define IS_AHEAD(v, i, j, t) (view[v].length[j] == DONE)
#define SOMEBODY_AHEAD(v, i) SOME(IS_AHEAD, v, i, 0)
#ifdef NO_GATHERED /* what the liar has told this one */
#define TOLD(v, i)  BIT(i)
#else
#define TOLD(v, i)  view[v].members
#endif
#ifdef LATE_TAKEOVER
#define MAY_TAKE(v, i) true
#else
#define MAY_TAKE(v, i) (SOMEBODY_AHEAD(v, i) || !(view[v].ready & TOLD(v, i)))
#endif
#define MAY_RUN(v, i) (!SOMEBODY_AHEAD(v, i) && !(view[v].claimed & BIT(i)))

/* Takeover: whether a sum of this epoch can be taken over. */
#ifdef LATER_EPOCH
#define KNOWN_EPOCH(i, t) true
#else
#define KNOWN_EPOCH(i, t) (view[t].epoch <= epoch[i])
#endif

/* The laws. */

#define TWO(i, j)  (done[i] && done[j] && done[i] != done[j])
#define WEDGED(i, j) (done[i] && !done[j] && OWN_AGAINST(j, done[i]))
#define SPLIT(s, t) (OPEN(s) && OPEN(t) && view[s].members != view[t].members)

inline laws() {
#if defined(REACH)
#if N == 3
  assert(!(done[0] && done[1] && done[2]))
#else
  assert(!(done[0] && done[1]))
#endif
#elif defined(REACH_TAKEOVER) || defined(REACH_GUEST) || defined(REACH_RERUN)
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
/* A view of others that it has not been in. It does not go back to older lives of others than it knows. */
#define MAY_JOIN(i, v) (v <= views && view[v].epoch == epoch[i] && MEMBER(i, v) && !(view[v].here & BIT(i)) \
                        && view[v].life[i] == life[i] && NOT_OLDER(v, at[i]))

inline finish(i, t) {
  done[i] = t;
  past[i] = true;
  mark[i] = 0
}

inline take_over(i, t) { /* and report again */
  if
  :: SOMEBODY_AHEAD(at[i], i)
  :: else -> view[at[i]].claimed = view[at[i]].claimed | TOLD(at[i], i)
  fi;
  view[at[i]].took[i] = t;
  finish(i, t);
#if defined(REACH_TAKEOVER)
  assert(false);
#elif defined(REACH_GUEST)
  assert(t >= 254 || MEMBER(i, t));
#endif
  laws()
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
#ifndef NO_GATHERED
  :: atomic { at[_pid] && ALL(at[_pid], here) && !(view[at[_pid]].gathered & BIT(_pid)) ->
       view[at[_pid]].gathered = view[at[_pid]].gathered | BIT(_pid) }
#endif

  /* The sum. Nobody that it believes is ahead: it is ready. Who had no past has taken over place 0 by now. */
  :: atomic { at[_pid] && !done[_pid] && SETTLED(at[_pid]) && !(view[at[_pid]].ready & BIT(_pid)) &&
              MAY_RUN(at[_pid], _pid) && MAY_ENTER(mark[_pid], view[at[_pid]].members) ->
       past[_pid] = true;
       view[at[_pid]].ready = view[at[_pid]].ready | BIT(_pid) }
  :: atomic { at[_pid] && ALL(at[_pid], ready) && !(view[at[_pid]].agreed & BIT(_pid)) ->
       view[at[_pid]].agreed = view[at[_pid]].agreed | BIT(_pid) }
  :: atomic { at[_pid] && ALL(at[_pid], agreed) && !(view[at[_pid]].shown & BIT(_pid)) ->
       view[at[_pid]].shown = view[at[_pid]].shown | BIT(_pid);
       if
       :: !done[_pid] -> mark[_pid] = at[_pid]
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
  :: atomic { MAY_CATCH_UP(_pid) -> take_over(_pid, 254) }
  :: atomic { MAY_CATCH_UP(_pid) -> take_over(_pid, 255) }
#endif

  /* Its life. */
  :: atomic { kills && at[_pid] -> kills--; life[_pid]++; at[_pid] = 0 }
  :: atomic { wipes && at[_pid] -> wipes--; life[_pid]++; at[_pid] = 0;
       past[_pid] = false; done[_pid] = 0; mark[_pid] = 0 }
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
