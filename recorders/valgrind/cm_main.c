/* A Valgrind tool that writes a program's data accesses into a FIFO.

   Copyright (C) 2026 the cachemate authors
   SPDX-License-Identifier: GPL-2.0-or-later

   This program is free software; you can redistribute it and/or modify it under the terms of the GNU General Public
   License as published by the Free Software Foundation; either version 2 of the License, or (at your option) any later
   version. It is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY; see the file LICENSE.

   Problem: a recording needs every data access with thread, size, kind and the instructions between, fast enough for
   real programs. Method: instructions and accesses are counted at translation time and added where control may leave;
   a hit of the most recent line of its set is found in line, everything else calls a helper (far from the ends of the
   window; near them every access calls it, so that the window is exact to the access); an L1 filter (set-associative LRU,
   one per thread, kept coherent: a store takes the line from the others) lets through what a cache would have to ask
   for, its misses and the stores to lines that others may have; they leave as varints in chunks of at most PIPE_BUF
   bytes, which a pipe writes whole, so that many processes can share one FIFO. README.md describes the chunks.

   A record names the youngest recorded access that its address waits for. Within a block the loads behind an address are
   known when it is translated; a general register and a stored word remember the description of their last value, so that
   they are known across blocks. A load that is not recorded hits a line that an earlier record brought, and waits for it.
   Only recorded accesses look; others note an address.

   What the instructions between two misses cost is sampled: a few thousand instructions in some hundred thousand blocks go
   through a reorder window of five sizes, in which a value waits for those that it is computed from, a load for the store
   to its word, and everything behind a mispredicted branch for its condition (section "What the core waits for"). */

#include "libvex_guest_offsets.h"
#include "pub_tool_basics.h"
#include "pub_tool_clientstate.h"
#include "pub_tool_libcassert.h"
#include "pub_tool_libcbase.h"
#include "pub_tool_libcfile.h"
#include "pub_tool_libcprint.h"
#include "pub_tool_libcproc.h"
#include "pub_tool_machine.h"
#include "pub_tool_mallocfree.h"
#include "pub_tool_options.h"
#include "pub_tool_tooliface.h"
#include "pub_tool_transtab.h"
#include "pub_tool_vki.h"
#include "pub_tool_xarray.h"

/* Moves a descriptor out of the client's reach. Not in the tool headers, but in every libcoregrind. */
extern Int VG_(safe_fd)(Int oldfd);
extern Int VG_(getpid)(void);
/* Translations may be discarded while none is running. The core says so during system calls; between two turns of
   a thread, where this tool does it, none runs either. */
extern Bool VG_(ok_to_discard_translations);

/* ---- Options ---- */
static const HChar *clo_fifo = NULL;
static ULong clo_skip = 0, clo_max = ~0ULL;
static ULong clo_skip_ms = 0, clo_max_ms = 0;
static ULong clo_burst = 0;
static Long clo_burst_percent = 10;
static Long clo_l1_bytes = 0, clo_l1_ways = 8, clo_l1_line = 64;
static Bool clo_follow = False;
static Bool clo_stop = False;

/* ---- The filter ---- */
#define NO_LINE (~0ULL)
/* In a tag: another thread has loaded the line since this one's last store to it. A line without it is nobody else's. */
#define SHARED (1ULL << 63)
static UInt l1_ways, l1_line_bits = 6;
static ULong l1_set_mask;

static ULong *l1_new(void)
{
   if (clo_l1_bytes == 0)
      return NULL;
   SizeT lines = (l1_set_mask + 1) * l1_ways;
   ULong *tags = VG_(malloc)("cm.l1", lines * sizeof(ULong));
   for (SizeT i = 0; i < lines; i++)
      tags[i] = NO_LINE;
   return tags;
}

static inline ULong *l1_set(ULong *tags, ULong line) { return tags + (line & l1_set_mask) * l1_ways; }

/* Most recent first, SHARED kept; True = hit. */
static inline Bool l1_touch(ULong *tags, ULong line)
{
   ULong *set = l1_set(tags, line);
   if (LIKELY((set[0] & ~SHARED) == line))
      return True;
   ULong moved = set[0];
   for (UInt way = 1; way < l1_ways; way++) {
      ULong here = set[way];
      set[way] = moved;
      if ((here & ~SHARED) == line) {
         set[0] = here;
         return True;
      }
      moved = here;
   }
   set[0] = line;
   return False;
}

static void l1_invalidate(ULong *tags, ULong line)
{
   ULong *set = l1_set(tags, line);
   for (UInt way = 0; way < l1_ways; way++) {
      if ((set[way] & ~SHARED) != line)
         continue;
      for (; way + 1 < l1_ways; way++)
         set[way] = set[way + 1];
      set[way] = NO_LINE;
      return;
   }
}

/* Another thread loads the line; False = it was not here. */
static Bool l1_share(ULong *tags, ULong line)
{
   ULong *set = l1_set(tags, line);
   for (UInt way = 0; way < l1_ways; way++) {
      if ((set[way] & ~SHARED) != line)
         continue;
      set[way] |= SHARED;
      return True;
   }
   return False;
}

/* ---- What an address depends on ---- */
#define MAX_SOURCES 3
#define MAX_DEPTH 4
#define REGISTERS 16

typedef struct Load Load;

/* The loads and registers from which a value was computed. Of more, the first are left out. */
typedef struct {
   UInt count;
   ULong of[MAX_SOURCES]; /* a register's number plus 1, or a Load */
} Sources;

typedef struct {
   ULong begin, before; /* instructions of the thread when its last two runs began, written by the block itself */
} Block;

/* A load in a translated block, and the last time that it was recorded. */
struct Load {
   Block *block;
   Sources address;
   ULong record; /* number of the record in its thread, 0 = never recorded */
   ULong at;     /* instructions of the thread by then */
   UInt thread;
   ULong touched; /* its last address, written by the block itself */
};

/* An access in a translated block. */
typedef struct {
   UInt counted; /* instructions since the last flush, itself included */
   UInt index;   /* instructions since the start of the block */
   UShort size, site;
   UShort place; /* among the accesses of its piece, for the sampled window */
   Bool store;
   Block *block;
   Sources address;
   Load *load; /* NULL for a store */
} Access;

/* The description of each general register's last value in the running thread, 0 = no load; written by the blocks. */
static Sources *written[REGISTERS];

/* The same of the words that were stored last, by address; written by the blocks. */
#define KEPT_BITS 12
static struct {
   ULong address;
   const Sources *value;
} kept[1 << KEPT_BITS];

/* The last record of a line. */
#define BROUGHT_BITS 10
static struct {
   ULong line, record;
   UInt thread;
} brought[1 << BROUGHT_BITS];

/* By a hash, because arrays are often a power of two apart. */
static inline UInt place_of_line(ULong line) { return line * 0x9e3779b97f4a7c15ULL >> (64 - BROUGHT_BITS); }

/* Descriptions live until all translations are discarded. */
typedef struct Arena {
   struct Arena *next;
   SizeT used;
   UChar bytes[64 * 1024 - 16];
} Arena;
static Arena *arena;

static void *describe(SizeT bytes)
{
   bytes = (bytes + 7) & ~(SizeT)7;
   if (!arena || arena->used + bytes > sizeof(arena->bytes)) {
      Arena *grown = VG_(malloc)("cm.arena", sizeof(Arena));
      grown->next = arena;
      grown->used = 0;
      arena = grown;
   }
   void *made = arena->bytes + arena->used;
   arena->used += bytes;
   VG_(memset)(made, 0, bytes);
   return made;
}

static inline Bool is_register(ULong source) { return source >= 1 && source <= REGISTERS; }

static void add_source(Sources *to, ULong source)
{
   for (UInt i = 0; i < to->count; i++)
      if (to->of[i] == source)
         return;
   if (to->count == MAX_SOURCES) {
      for (UInt i = 1; i < MAX_SOURCES; i++)
         to->of[i - 1] = to->of[i];
      to->count--;
   }
   to->of[to->count++] = source;
}

static void add_sources(Sources *to, const Sources *from)
{
   for (UInt i = 0; i < from->count; i++)
      add_source(to, from->of[i]);
}

/* ---- Threads: Valgrind reuses its ids, so each creation gets a number of its own. ---- */
typedef struct {
   Bool live;
   UInt number;
   UInt os_thread; /* the kernel's id, 0 until it has run */
   ULong *l1;
   ULong instructions, accesses; /* since its start, while not running */
   ULong window_instructions, window_accesses; /* of these, before the window or in pauses */
   ULong resting_instructions, resting_accesses; /* of these, before the pause */
   ULong recorded_at;            /* instructions at its last record */
   ULong records;                /* with those of the parent before a fork, so that its loads are known as old ones */
   ULong inherited_records;
   Sources *written[REGISTERS];  /* while not running */
} Thread;

static Thread *threads; /* by Valgrind's id */
static UInt threads_size, next_number;
static Thread *current; /* whose counters the globals below are */
static ULong *current_l1;
/* Of the running thread, up to the last flush of the block that runs. */
static ULong instructions, accesses;
/* Data accesses of the process before window and filter = this and `accesses`. */
static ULong seen_elsewhere;
/* Every access calls the helper, which counts it. */
static Bool exact;
/* Between bursts the program runs without our code (PAUSED), or with it at rest (RESTING). */
static enum { WAITING, SKIPPING, RECORDING, PAUSED, RESTING, OFF } mode = RECORDING;
/* When the program started, or the wait ended. */
static ULong begun_ms;

/* ---- What the core waits for ---- */
/* Problem: between two misses a program takes the time of its longest chain of dependent instructions and of its mispredicted
   branches, which differs fivefold between programs. Method: a window of W instructions is filled in order, each instruction
   completes when the values that it needs are known and its latency is over, and leaves in order (Karkhanis and Smith, A
   first-order superscalar processor model, ISCA 2004); the width is unlimited, and loads hit the first cache. Branches are
   predicted by a perceptron (Jimenez and Lin, HPCA 2001), indirect jumps by their last target after the same jumps. Lines of
   code that miss a cache are counted, and what each costs is the machine's (the same model, section 4.2). What
   follows a mispredicted branch enters when its condition is known; what refilling a pipeline costs is the machine's. */
#define WINDOWS 5
#define SMALLEST_WINDOW 32u
#define LARGEST_WINDOW (SMALLEST_WINDOW << (WINDOWS - 1))
/* The guest's state in units of 8 bytes; what lies further is not followed. */
#define STATE_WORDS 128u
/* Instructions of a sample: before it, only branches are looked at, which trains their predictors; its first fill the windows. */
#define TRAINING_INSTRUCTIONS 32768u
#define SAMPLE_WARM_UP 1024u
#define SAMPLE_INSTRUCTIONS 4096u
/* Blocks between samples. */
#define SAMPLE_PERIOD 200000ULL
#define LOAD_LATENCY 5
#define LOCK_LATENCY 18

typedef struct {
   UInt at[WINDOWS]; /* cycle by window, since the sample began */
} Cycles;

typedef enum { COMPUTES, LOADS, STORES, BEGINS, FENCES } StepKind;

#define STEP_SOURCES 3
#define NO_PLACE 0xffff
typedef struct {
   UChar kind, latency;
   UShort place;              /* of its access */
   UInt target;               /* a value; of an instruction that begins, its line of code */
   UInt source[STEP_SOURCES]; /* values; 0 = known when the instruction enters */
} Step;

/* Instructions up to a place where control may leave. */
typedef struct {
   UInt count, instructions;
   UInt condition;             /* a value; what the branch behind it waits for */
   enum { STAYS, BRANCHES, JUMPS } end;
   UInt site;                  /* of the branch */
   ULong untaken;              /* outcome with which it is not taken */
   Step step[];
} Piece;

/* Values are numbered: 0, words of the guest's state from 1 on, then the block's temporaries. */
#define FIRST_TEMP (1 + STATE_WORDS)
static Cycles *known; /* by value */
static UInt known_size;

/* Loads that missed the filter have numbers from 1 on within the sample. */
static UInt *load_behind; /* by value: the youngest such load that it was computed from, 0 = none */
static UShort load_site[2 * SAMPLE_INSTRUCTIONS + 1]; /* by number; 0 = it does not count, or no longer */
static UInt load_count;

/* By site: loads that missed the filter, and those of them for which a mispredicted branch waited. */
static struct {
   UInt loads, waited;
} branch_loads[1 << 16];

#define MAX_PIECE_ACCESSES 256
/* By place in the piece that runs. */
static struct {
   Addr address;
   UShort site;
   Bool missed;
} touched[MAX_PIECE_ACCESSES];

/* Not 0 while a sample runs. */
static ULong sampling;
static ULong next_sample; /* blocks */
static UInt trained, sampled; /* instructions */
static UInt mispredicted, unfetched; /* in the sample, behind its warm-up: branches, and lines of code that missed */
static Cycles enters, done, left, counted_from;
static UInt left_at[WINDOWS][LARGEST_WINDOW];

/* The last stores of the sample by word. */
#define STORED_WORDS 4096u
typedef struct {
   ULong word;
   ULong sample;
   Cycles known;
   UInt load_behind;
} Stored;
static Stored stored[STORED_WORDS];
/* The last misses of the sample by line: who reads on in a line waits for it. */
#define FETCHED_LINES 1024u
typedef struct {
   ULong line;
   ULong sample;
   UInt load;
} Fetched;
static Fetched fetched[FETCHED_LINES];
static ULong sample_number;

/* Of whole samples since the last chunk. */
static struct {
   UInt instructions, mispredicted, unfetched;
   UInt cycles[WINDOWS];
} core_counts;

/* An instruction cache of 32 KiB, LRU, which brings the next line too. It keeps its lines from sample to sample. */
#define CODE_SETS 64u
#define CODE_WAYS 8u
static UInt code_lines[CODE_SETS][CODE_WAYS];
static UInt code_line;

/* Makes it the most recent line of its set; returns whether it was there. */
static Bool bring_code(UInt line)
{
   UInt *set = code_lines[line % CODE_SETS];
   UInt way = 0;
   while (way < CODE_WAYS - 1 && set[way] != line)
      way++;
   Bool hit = set[way] == line;
   for (; way > 0; way--)
      set[way] = set[way - 1];
   set[0] = line;
   return hit;
}

static void fetch_code(UInt line, Bool counts)
{
   if (line == code_line)
      return;
   code_line = line;
   if (bring_code(line))
      return;
   if (counts)
      unfetched++;
   bring_code(line + 1);
   bring_code(line);
}

/* A perceptron for each branch by a hash of its site, over the outcomes of the last branches. */
#define HISTORY 32
#define PERCEPTRONS 4096u
#define THRESHOLD 75 /* 1.93 * HISTORY + 14 */
static signed char weights[PERCEPTRONS][HISTORY + 1];
static UInt outcomes;
#define TARGETS 4096u
static ULong targets[TARGETS];
static UInt jumps; /* a hash of the targets of the last five indirect jumps */

static Bool predicts_branch(UInt site, Bool taken)
{
   signed char *weight = weights[(site * 0x9e3779b1u) >> 20 & (PERCEPTRONS - 1)];
   Int sum = weight[HISTORY];
   for (UInt i = 0; i < HISTORY; i++)
      sum += outcomes >> i & 1 ? weight[i] : -weight[i];
   Bool right = (sum >= 0) == taken;
   if (!right || (sum < THRESHOLD && sum > -THRESHOLD))
      for (UInt i = 0; i <= HISTORY; i++) {
         Bool agrees = i == HISTORY ? taken : (Bool)(outcomes >> i & 1) == taken;
         Int changed = weight[i] + (agrees ? 1 : -1);
         if (changed >= -127 && changed <= 127)
            weight[i] = changed;
      }
   outcomes = outcomes << 1 | taken;
   return right;
}

static Bool predicts_jump(UInt site, ULong target)
{
   ULong *expected = &targets[((site ^ jumps) * 0x9e3779b1u) >> 20 & (TARGETS - 1)];
   Bool right = *expected == target;
   *expected = target;
   jumps = jumps << 6 ^ (UInt)(target >> 2) * 0x85ebca6bu >> 20;
   return right;
}

/* Makes place for so many values. */
static void know_values(UInt count)
{
   if (count <= known_size)
      return;
   known = VG_(realloc)("cm.known", known, count * sizeof(Cycles));
   VG_(memset)(known + known_size, 0, (count - known_size) * sizeof(Cycles));
   load_behind = VG_(realloc)("cm.behind", load_behind, count * sizeof(UInt));
   VG_(memset)(load_behind + known_size, 0, (count - known_size) * sizeof(UInt));
   known_size = count;
}

static void begin_sample(void)
{
   sampling = 1;
   trained = sampled = mispredicted = unfetched = load_count = 0;
   sample_number++;
   VG_(memset)(known, 0, FIRST_TEMP * sizeof(Cycles));
   VG_(memset)(load_behind, 0, FIRST_TEMP * sizeof(UInt));
   VG_(memset)(&enters, 0, sizeof(enters));
   VG_(memset)(&done, 0, sizeof(done));
   VG_(memset)(&left, 0, sizeof(left));
   VG_(memset)(left_at, 0, sizeof(left_at));
}

/* The instruction before has left when it and all older ones are done; the next one enters when there is room. */
static void begin_instruction(void)
{
   for (UInt w = 0; w < WINDOWS; w++) {
      UInt mask = (SMALLEST_WINDOW << w) - 1;
      if (done.at[w] > left.at[w])
         left.at[w] = done.at[w];
      UInt *place = &left_at[w][sampled & mask];
      if (*place > enters.at[w])
         enters.at[w] = *place;
      *place = left.at[w];
   }
   done = enters;
   sampled++;
   if (sampled == SAMPLE_WARM_UP)
      counted_from = left;
   if (sampled == SAMPLE_INSTRUCTIONS) {
      core_counts.instructions += SAMPLE_INSTRUCTIONS - SAMPLE_WARM_UP;
      core_counts.mispredicted += mispredicted;
      core_counts.unfetched += unfetched;
      for (UInt w = 0; w < WINDOWS; w++)
         core_counts.cycles[w] += left.at[w] - counted_from.at[w];
      sampling = 0;
   }
}

/* Of two numbers of loads or records. */
static inline ULong later_of(ULong number, ULong other) { return number > other ? number : other; }

static void wait_for(Cycles *cycles, const Cycles *other)
{
   for (UInt w = 0; w < WINDOWS; w++)
      if (other->at[w] > cycles->at[w])
         cycles->at[w] = other->at[w];
}

/* A load behind which its value is known: its own number if it missed the filter, or that of the miss that fetches its line. */
static UInt number_load(UInt place)
{
   ULong line = touched[place].address >> l1_line_bits;
   Fetched *last = &fetched[line % FETCHED_LINES];
   if (!touched[place].missed)
      return last->line == line && last->sample == sample_number ? last->load : 0;
   if (load_count == 2 * SAMPLE_INSTRUCTIONS)
      return 0;
   UShort site = touched[place].site;
   load_site[++load_count] = sampled >= SAMPLE_WARM_UP ? site : 0;
   if (sampled >= SAMPLE_WARM_UP)
      branch_loads[site].loads++;
   last->line = line;
   last->sample = sample_number;
   last->load = load_count;
   return load_count;
}

static void take_step(const Step *step)
{
   if (step->kind == BEGINS) {
      begin_instruction();
      fetch_code(step->target, sampled >= SAMPLE_WARM_UP);
      return;
   }
   if (step->kind == FENCES) {
      wait_for(&enters, &left);
      wait_for(&enters, &done);
      return;
   }
   Cycles cycles = enters;
   UInt behind = 0;
   for (UInt i = 0; i < STEP_SOURCES; i++) {
      wait_for(&cycles, &known[step->source[i]]);
      behind = later_of(behind, load_behind[step->source[i]]);
   }
   Addr address = step->place < MAX_PIECE_ACCESSES ? touched[step->place].address : 0;
   ULong word = address >> 3;
   Stored *last = &stored[word % STORED_WORDS];
   if (step->kind == STORES) {
      if (address) {
         last->word = word;
         last->sample = sample_number;
         last->known = cycles;
         last->load_behind = behind;
      }
      wait_for(&done, &cycles);
      return;
   }
   if (step->kind == LOADS && address) {
      if (last->word == word && last->sample == sample_number) {
         wait_for(&cycles, &last->known);
         behind = later_of(behind, last->load_behind);
      }
      behind = later_of(behind, number_load(step->place));
   }
   for (UInt w = 0; w < WINDOWS; w++)
      cycles.at[w] += step->latency;
   known[step->target] = cycles;
   load_behind[step->target] = behind;
   wait_for(&done, &cycles);
}

static VG_REGPARM(2) void on_piece(const Piece *piece, ULong outcome)
{
   Bool trains = trained < TRAINING_INSTRUCTIONS;
   if (trains) {
      trained += piece->instructions;
      for (UInt i = 0; i < piece->count; i++)
         if (piece->step[i].kind == BEGINS)
            fetch_code(piece->step[i].target, False);
   }
   for (UInt i = 0; i < piece->count && sampling && !trains; i++)
      take_step(&piece->step[i]);
   if (piece->end == STAYS || !sampling)
      return;
   Bool right = piece->end == BRANCHES ? predicts_branch(piece->site, outcome != piece->untaken)
                                       : predicts_jump(piece->site, outcome);
   if (trains)
      return;
   Cycles cycles = enters;
   wait_for(&cycles, &known[piece->condition]);
   for (UInt w = 0; w < WINDOWS; w++)
      cycles.at[w]++;
   wait_for(&done, &cycles);
   if (right)
      return;
   wait_for(&enters, &cycles);
   if (sampled >= SAMPLE_WARM_UP)
      mispredicted++;
   /* A load is waited for once: what follows the branch enters when it has returned. */
   UShort *site = &load_site[load_behind[piece->condition]];
   if (*site)
      branch_loads[*site].waited++;
   *site = 0;
}

/* ---- Chunks ---- */
#define CHUNK_MAGIC 0x344b4d43u /* CMK4 */
#define CHUNK_BYTES 4096u       /* PIPE_BUF */
#define NO_THREAD 0xffffffffu   /* a chunk that speaks for the process */
enum { FLAG_START = 1, FLAG_END = 2, FLAG_MAX = 4, FLAG_BURST = 8, FLAG_BRANCH_LOADS = 16 };
typedef struct {
   UInt magic, payload_bytes, pid, thread;
   ULong instructions, accesses;
   UInt records, flags;
   UInt os_thread;
   UInt core_instructions, core_cycles[WINDOWS], mispredicted, unfetched; /* since the last chunk */
} ChunkHead;

static UChar chunk[CHUNK_BYTES];
static UInt chunk_used = sizeof(ChunkHead), chunk_records;
static ULong chunk_address; /* the record before, within the chunk */
static Int fifo = -1;
static UInt my_pid;

static Bool discard_due; /* translations have to be made anew */
static ULong translated; /* instructions in translations since then */

static void switch_off(void)
{
   mode = OFF;
   discard_due = True;
}

static void send(UInt flags)
{
   ChunkHead *head = (ChunkHead *)chunk;
   if (fifo < 0)
      return;
   head->magic = CHUNK_MAGIC;
   head->payload_bytes = chunk_used - sizeof(ChunkHead);
   head->pid = my_pid;
   head->thread = current ? current->number : NO_THREAD;
   head->instructions = current ? instructions - current->window_instructions : 0;
   head->accesses = current ? accesses - current->window_accesses : 0;
   head->records = chunk_records;
   head->flags = flags;
   head->os_thread = current ? current->os_thread : 0;
   VG_(memset)(&head->core_instructions, 0, sizeof(*head) - offsetof(ChunkHead, core_instructions));
   if (current) {
      head->core_instructions = core_counts.instructions;
      head->mispredicted = core_counts.mispredicted;
      head->unfetched = core_counts.unfetched;
      VG_(memcpy)(head->core_cycles, core_counts.cycles, sizeof(head->core_cycles));
      VG_(memset)(&core_counts, 0, sizeof(core_counts));
   }
   Int written;
   do
      written = VG_(write)(fifo, chunk, chunk_used);
   while (written == -VKI_EINTR);
   if (written != (Int)chunk_used) {
      /* The reader is gone: the program goes on without being recorded. */
      VG_(close)(fifo);
      fifo = -1;
      switch_off();
   }
   chunk_used = sizeof(ChunkHead);
   chunk_records = 0;
   chunk_address = 0;
}

static inline void put(ULong value)
{
   while (value >= 0x80) {
      chunk[chunk_used++] = value | 0x80;
      value >>= 7;
   }
   chunk[chunk_used++] = value;
}

/* Sends what samples told of loads by site, once for the process: site, loads, and those for which a branch waited. */
static void send_branch_loads(void)
{
   Thread *running = current;
   if (chunk_records)
      send(0);
   current = NULL;
   for (UInt site = 1; site < sizeof(branch_loads) / sizeof(branch_loads[0]); site++) {
      if (!branch_loads[site].loads)
         continue;
      put(site);
      put(branch_loads[site].loads);
      put(branch_loads[site].waited);
      if (chunk_used > CHUNK_BYTES - 3 * 10)
         send(FLAG_BRANCH_LOADS);
   }
   if (chunk_used > sizeof(ChunkHead))
      send(FLAG_BRANCH_LOADS);
   VG_(memset)(branch_loads, 0, sizeof(branch_loads));
   current = running;
}

/* The record that brought the line in which a load hit, 0 if it is long ago. */
static ULong record_of_line(ULong address)
{
   ULong line = address >> l1_line_bits;
   UInt place = place_of_line(line);
   return brought[place].line == line && brought[place].thread == current->number ? brought[place].record : 0;
}

/* The youngest record behind a value. `begin` is the start of the block's present run if the value was computed in it, and
   NOT_HERE if a register kept it. */
#define NOT_HERE (~0ULL)
static ULong youngest(const Sources *sources, const Block *here, ULong begin, UInt depth)
{
   ULong found = 0;
   for (UInt i = 0; i < sources->count; i++) {
      ULong source = sources->of[i], record = 0;
      if (is_register(source)) {
         const Sources *last = written[source - 1];
         if (last && depth)
            record = youngest(last, here, NOT_HERE, depth - 1);
      } else {
         const Load *load = (const Load *)(Addr)source;
         /* A register kept its value since the last run of another block, or the run before of this one. */
         ULong from = begin != NOT_HERE ? begin : load->block == here ? here->before : load->block->begin;
         Bool mine = load->record && load->thread == current->number;
         if (mine && (load->at > from || !depth))
            record = load->record;
         else {
            record = record_of_line(load->touched);
            if (depth)
               record = later_of(record, youngest(&load->address, here, begin, depth - 1));
            UInt place = load->touched >> 3 & ((1 << KEPT_BITS) - 1);
            if (depth && kept[place].address == load->touched && kept[place].value)
               record = later_of(record, youngest(kept[place].value, here, NOT_HERE, depth - 1));
         }
      }
      found = later_of(found, record);
   }
   return found;
}

static void record(Addr address, UInt size, const Access *access, ULong now)
{
   UInt store = access->store;
   if (UNLIKELY(chunk_used > CHUNK_BYTES - 3 * 10 - 3))
      send(0);
   ULong number = ++current->records;
   ULong source = youngest(&access->address, access->block, now - access->index, MAX_DEPTH);
   ULong distance = source > current->inherited_records ? number - source : 0;
   if (access->load) {
      access->load->record = number;
      access->load->at = now;
      access->load->thread = current->number;
   }
   UInt code = 7;
   if (LIKELY(size <= 64 && (size & (size - 1)) == 0))
      code = __builtin_ctz(size);
   UInt place = place_of_line(address >> l1_line_bits);
   brought[place].line = address >> l1_line_bits;
   brought[place].record = number;
   brought[place].thread = current->number;
   put((now - current->recorded_at) << 4 | code << 1 | store);
   if (code == 7)
      put(size);
   ULong difference = address - chunk_address;
   put(difference << 1 ^ (ULong)((Long)difference >> 63));
   chunk_address = address;
   chunk[chunk_used++] = distance > 254 ? 255 : distance;
   chunk[chunk_used++] = access->site & 0xff;
   chunk[chunk_used++] = access->site >> 8;
   current->recorded_at = now;
   chunk_records++;
}

/* ---- Called for every data access ---- */
/* False where a cache would have to ask for the line, or for it alone. */
static Bool line_hits(ULong line, UInt store)
{
   Bool hit = l1_touch(current->l1, line);
   ULong *tag = l1_set(current->l1, line);
   if (LIKELY(hit && !(store && (*tag & SHARED))))
      return True;
   Bool elsewhere = False;
   for (UInt i = 0; i < threads_size; i++) {
      if (!threads[i].live || &threads[i] == current)
         continue;
      if (store)
         l1_invalidate(threads[i].l1, line);
      else
         elsewhere |= l1_share(threads[i].l1, line);
   }
   *tag = elsewhere ? line | SHARED : line;
   return False;
}

static Bool filter_hits(Addr *address, UInt *size, UInt store)
{
   ULong first = *address >> l1_line_bits, last = (*address + *size - 1) >> l1_line_bits;
   Bool hit = line_hits(first, store);
   for (ULong line = first + 1; line <= last; line++) {
      /* At most one miss an access: the first line that missed is the record's. */
      if (!line_hits(line, store) && hit) {
         hit = False;
         *size -= (line << l1_line_bits) - *address;
         *address = line << l1_line_bits;
      }
   }
   return hit;
}

static VG_REGPARM(2) void on_access(Addr address, Access *access)
{
   UInt size = access->size;
   Addr first = address;
   Bool missed = False;
   if (LIKELY(mode == RECORDING)) {
      missed = !clo_l1_bytes || !filter_hits(&address, &size, access->store);
      if (missed)
         record(address, size, access, instructions + access->counted);
   } else if (mode == SKIPPING && clo_l1_bytes)
      filter_hits(&address, &size, access->store);
   if (UNLIKELY(sampling && access->place < MAX_PIECE_ACCESSES)) {
      touched[access->place].address = first;
      touched[access->place].site = access->site;
      touched[access->place].missed = missed;
   }
}

/* The window begins behind this access. */
static void begin_window(ULong now)
{
   for (UInt i = 0; i < threads_size; i++) {
      Thread *thread = &threads[i];
      thread->window_instructions = thread->recorded_at = thread == current ? now : thread->instructions;
      thread->window_accesses = thread == current ? accesses : thread->accesses;
   }
   mode = RECORDING;
}

static VG_REGPARM(2) void on_exact_access(Addr address, Access *access)
{
   if (UNLIKELY(mode == OFF))
      return;
   accesses++;
   ULong seen = seen_elsewhere + accesses, now = instructions + access->counted;
   on_access(address, access);
   if (UNLIKELY(mode == SKIPPING && seen == clo_skip))
      begin_window(now);
   if (UNLIKELY(mode == RECORDING && seen - clo_skip >= clo_max)) {
      instructions = now;
      send_branch_loads();
      send(FLAG_MAX);
      switch_off();
      if (clo_stop)
         VG_(exit)(0);
   }
}

/* More accesses than a thread makes in one turn (100 000 blocks). */
#define TURN_ACCESSES (32ULL << 20)

/* Is an end of the window too near to count by blocks? */
static Bool near_an_end(void)
{
   ULong seen = seen_elsewhere + accesses;
   if (mode == WAITING || mode == PAUSED || mode == RESTING)
      return False;
   if (mode == SKIPPING)
      return clo_skip - seen < TURN_ACCESSES;
   return clo_max != ~0ULL && clo_skip + clo_max - seen < TURN_ACCESSES;
}

/* ---- Instrumentation ---- */
typedef struct {
   IRSB *out;
   UWord counted, made; /* instructions and accesses since the last flush */
   UWord index;         /* instructions since the start */
   UShort site;         /* of this instruction */
   /* A load that a store of the same instruction may turn into a modify. */
   IRExpr *load_address, *load_guard;
   Int load_size;
   Load *load;
   Block *block;
   Sources *temps;             /* by temporary of the block */
   Sources registers[REGISTERS];
   UInt changed; /* registers, as bits, whose new description the block has not written yet */
   /* The piece since the last place where control may leave. */
   Step *steps;
   UInt step_count, place_count;
   UInt load_step; /* the step of the load above, plus 1 */
   Bool *is_value; /* by temporary: used for more than an address */
   ULong behind;   /* address of the next instruction */
} Build;

/* The general register of an offset in the guest's state, -1 if there is none. */
static Int register_of(Int offset)
{
   Int first = OFFSET_amd64_RAX;
   return offset >= first && offset < first + 8 * REGISTERS ? (offset - first) / 8 : -1;
}

static void add_atom(Build *b, Sources *to, const IRExpr *atom)
{
   if (atom->tag == Iex_RdTmp)
      add_sources(to, &b->temps[atom->Iex.RdTmp.tmp]);
}

static Sources sources_of(Build *b, const IRExpr *atom)
{
   Sources sources = {0};
   add_atom(b, &sources, atom);
   return sources;
}

/* What the value of an expression without a load depends on. */
static Sources sources_of_data(Build *b, const IRExpr *data)
{
   Sources sources = {0};
   switch (data->tag) {
   case Iex_Get: {
      Int number = register_of(data->Iex.Get.offset);
      if (number >= 0)
         add_sources(&sources, &b->registers[number]);
      break;
   }
   case Iex_RdTmp:
      add_atom(b, &sources, data);
      break;
   case Iex_Unop:
      add_atom(b, &sources, data->Iex.Unop.arg);
      break;
   case Iex_Binop:
      add_atom(b, &sources, data->Iex.Binop.arg1);
      add_atom(b, &sources, data->Iex.Binop.arg2);
      break;
   case Iex_Triop:
      add_atom(b, &sources, data->Iex.Triop.details->arg1);
      add_atom(b, &sources, data->Iex.Triop.details->arg2);
      add_atom(b, &sources, data->Iex.Triop.details->arg3);
      break;
   case Iex_ITE:
      add_atom(b, &sources, data->Iex.ITE.iftrue);
      add_atom(b, &sources, data->Iex.ITE.iffalse);
      break;
   default:
      break;
   }
   return sources;
}

static IRExpr *assign(Build *b, IRType type, IRExpr *value)
{
   IRTemp temp = newIRTemp(b->out->tyenv, type);
   addStmtToIRSB(b->out, IRStmt_WrTmp(temp, value));
   return IRExpr_RdTmp(temp);
}
static IRExpr *binop(Build *b, IROp op, IRExpr *x, IRExpr *y)
{
   return assign(b, Ity_I64, IRExpr_Binop(op, x, y));
}
static IRExpr *number64(ULong value) { return IRExpr_Const(IRConst_U64(value)); }
static IRExpr *number8(UChar value) { return IRExpr_Const(IRConst_U8(value)); }
static IRExpr *load64(Build *b, IRExpr *where) { return assign(b, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, where)); }

/* ---- Steps of the sampled window ---- */
#define MAX_STEPS 3000u

static UInt value_of(const IRExpr *atom) { return atom->tag == Iex_RdTmp ? FIRST_TEMP + atom->Iex.RdTmp.tmp : 0; }

static UInt state_value(Int offset)
{
   return offset >= 0 && offset < 8 * (Int)STATE_WORDS && offset != OFFSET_amd64_RIP ? 1 + offset / 8 : 0;
}

static Step *add_step(Build *b, StepKind kind, UInt latency, UInt target)
{
   static Step dropped;
   Step *step = b->step_count < MAX_STEPS ? &b->steps[b->step_count++] : &dropped;
   VG_(memset)(step, 0, sizeof(Step));
   step->kind = kind;
   step->latency = latency;
   step->target = target;
   step->place = NO_PLACE;
   return step;
}

/* Latencies of today's cores in cycles; moves and changes of width are free. */
static UInt latency_of(IRTypeEnv *types, const IRExpr *data)
{
   IROp op = data->tag == Iex_Unop    ? data->Iex.Unop.op
             : data->tag == Iex_Binop ? data->Iex.Binop.op
             : data->tag == Iex_Triop ? data->Iex.Triop.details->op
                                      : data->Iex.Qop.details->op;
   switch (op) {
   case Iop_Mul8: case Iop_Mul16: case Iop_Mul32: case Iop_Mul64:
   case Iop_MullS8: case Iop_MullS16: case Iop_MullS32: case Iop_MullS64:
   case Iop_MullU8: case Iop_MullU16: case Iop_MullU32: case Iop_MullU64:
   case Iop_Clz32: case Iop_Clz64: case Iop_Ctz32: case Iop_Ctz64:
      return 3;
   case Iop_DivModU64to32: case Iop_DivModS64to32: case Iop_DivModU128to64: case Iop_DivModS128to64:
   case Iop_DivU32: case Iop_DivS32: case Iop_DivU64: case Iop_DivS64:
   case Iop_DivF64: case Iop_DivF32: case Iop_SqrtF64: case Iop_SqrtF32:
   case Iop_Div32Fx4: case Iop_Div64Fx2: case Iop_Div32Fx8: case Iop_Div64Fx4: case Iop_Div32F0x4: case Iop_Div64F0x2:
   case Iop_Sqrt32Fx4: case Iop_Sqrt64Fx2: case Iop_Sqrt32Fx8: case Iop_Sqrt64Fx4: case Iop_Sqrt32F0x4: case Iop_Sqrt64F0x2:
      return 14;
   case Iop_Mul16x8: case Iop_Mul32x4: case Iop_MulHi16Ux8: case Iop_MulHi16Sx8: case Iop_Mul16x16: case Iop_Mul32x8:
   case Iop_I32StoF64: case Iop_I64StoF64: case Iop_F64toI32S: case Iop_F64toI64S: case Iop_F64toF32: case Iop_F32toF64:
      return 5;
   case Iop_AddF64: case Iop_SubF64: case Iop_MulF64: case Iop_AddF32: case Iop_SubF32: case Iop_MulF32:
   case Iop_Add32Fx4: case Iop_Sub32Fx4: case Iop_Mul32Fx4: case Iop_Add64Fx2: case Iop_Sub64Fx2: case Iop_Mul64Fx2:
   case Iop_Add32Fx8: case Iop_Sub32Fx8: case Iop_Mul32Fx8: case Iop_Add64Fx4: case Iop_Sub64Fx4: case Iop_Mul64Fx4:
   case Iop_Add32F0x4: case Iop_Sub32F0x4: case Iop_Mul32F0x4: case Iop_Add64F0x2: case Iop_Sub64F0x2: case Iop_Mul64F0x2:
   case Iop_CmpF64: case Iop_MAddF64: case Iop_MSubF64: case Iop_MAddF32: case Iop_MSubF32:
      return 4;
   case Iop_Not8: case Iop_Not16: case Iop_Not32: case Iop_Not64:
      return 1;
   default:
      return data->tag == Iex_Unop && typeOfIRExpr(types, data->Iex.Unop.arg) < Ity_F16 ? 0 : 1;
   }
}

/* Steps of a value without a load. */
static void add_value(Build *b, IRTypeEnv *types, IRTemp temp, IRExpr *data)
{
   Step *step = add_step(b, COMPUTES, 0, FIRST_TEMP + temp);
   UInt latency = 0;
   switch (data->tag) {
   case Iex_Get:
      step->source[0] = state_value(data->Iex.Get.offset);
      break;
   case Iex_RdTmp:
      step->source[0] = value_of(data);
      break;
   case Iex_Unop:
      step->source[0] = value_of(data->Iex.Unop.arg);
      latency = latency_of(types, data);
      break;
   case Iex_Binop:
      step->source[0] = value_of(data->Iex.Binop.arg1);
      step->source[1] = value_of(data->Iex.Binop.arg2);
      latency = latency_of(types, data);
      break;
   case Iex_Triop:
      step->source[0] = value_of(data->Iex.Triop.details->arg2);
      step->source[1] = value_of(data->Iex.Triop.details->arg3);
      latency = latency_of(types, data);
      break;
   case Iex_Qop:
      step->source[0] = value_of(data->Iex.Qop.details->arg2);
      step->source[1] = value_of(data->Iex.Qop.details->arg3);
      step->source[2] = value_of(data->Iex.Qop.details->arg4);
      latency = latency_of(types, data);
      break;
   case Iex_ITE:
      step->source[0] = value_of(data->Iex.ITE.cond);
      step->source[1] = value_of(data->Iex.ITE.iftrue);
      step->source[2] = value_of(data->Iex.ITE.iffalse);
      latency = 1;
      break;
   case Iex_CCall:
      for (UInt i = 0, used = 0; data->Iex.CCall.args[i] && used < STEP_SOURCES; i++)
         if (value_of(data->Iex.CCall.args[i]))
            step->source[used++] = value_of(data->Iex.CCall.args[i]);
      latency = 1;
      break;
   default:
      break;
   }
   /* An address is added up where it is used. */
   step->latency = b->is_value[temp] ? latency : 0;
}

/* Which operation set the flags; the header names neither offset. */
#define OFFSET_CC_OP (OFFSET_amd64_R15 + 8)
#define OFFSET_CC_NDEP (OFFSET_amd64_R15 + 32)

static void add_put(Build *b, IRTypeEnv *types, Int offset, IRExpr *data)
{
   if (data->tag == Iex_Const && (offset == OFFSET_CC_OP || offset == OFFSET_CC_NDEP))
      return;
   Int size = sizeofIRType(typeOfIRExpr(types, data));
   for (Int word = 0; word < (size + 7) / 8; word++)
      if (state_value(offset + 8 * word))
         add_step(b, COMPUTES, 0, state_value(offset + 8 * word))->source[0] = value_of(data);
}

static void use(Build *b, const IRExpr *atom)
{
   if (atom && atom->tag == Iex_RdTmp)
      b->is_value[atom->Iex.RdTmp.tmp] = True;
}

/* Finds the temporaries that are used for more than addresses: backward, because a value's operands are values. */
static void find_values(Build *b, const IRSB *in)
{
   use(b, in->next);
   for (Int i = in->stmts_used - 1; i >= 0; i--) {
      const IRStmt *st = in->stmts[i];
      switch (st->tag) {
      case Ist_WrTmp: {
         const IRExpr *data = st->Ist.WrTmp.data;
         if (!b->is_value[st->Ist.WrTmp.tmp])
            break;
         if (data->tag == Iex_RdTmp)
            use(b, data);
         else if (data->tag == Iex_Unop)
            use(b, data->Iex.Unop.arg);
         else if (data->tag == Iex_Binop) {
            use(b, data->Iex.Binop.arg1);
            use(b, data->Iex.Binop.arg2);
         } else if (data->tag == Iex_Triop) {
            use(b, data->Iex.Triop.details->arg2);
            use(b, data->Iex.Triop.details->arg3);
         } else if (data->tag == Iex_ITE) {
            use(b, data->Iex.ITE.cond);
            use(b, data->Iex.ITE.iftrue);
            use(b, data->Iex.ITE.iffalse);
         } else if (data->tag == Iex_CCall)
            for (UInt a = 0; data->Iex.CCall.args[a]; a++)
               use(b, data->Iex.CCall.args[a]);
         break;
      }
      case Ist_Put:
         /* The stack pointer is advanced before the core. */
         if (st->Ist.Put.offset != OFFSET_amd64_RSP)
            use(b, st->Ist.Put.data);
         break;
      case Ist_Store:
         use(b, st->Ist.Store.data);
         break;
      case Ist_StoreG:
         use(b, st->Ist.StoreG.details->data);
         use(b, st->Ist.StoreG.details->guard);
         break;
      case Ist_LoadG:
         use(b, st->Ist.LoadG.details->alt);
         use(b, st->Ist.LoadG.details->guard);
         break;
      case Ist_CAS:
         use(b, st->Ist.CAS.details->expdLo);
         use(b, st->Ist.CAS.details->dataLo);
         break;
      case Ist_Exit:
         use(b, st->Ist.Exit.guard);
         break;
      default:
         break;
      }
   }
}

/* True where the access is no hit of the most recent line of its set, or others may have that line. */
static IRExpr *slow_path(Build *b, IRExpr *address, Int size)
{
   IRExpr *line = binop(b, Iop_Shr64, address, number8(l1_line_bits));
   IRExpr *last = binop(b, Iop_Add64, address, number64(size - 1));
   last = binop(b, Iop_Shr64, last, number8(l1_line_bits));
   IRExpr *set = binop(b, Iop_And64, line, number64(l1_set_mask));
   set = binop(b, Iop_Mul64, set, number64(l1_ways * sizeof(ULong)));
   set = binop(b, Iop_Add64, load64(b, mkIRExpr_HWord((HWord)&current_l1)), set);
   IRExpr *tag = load64(b, set);
   IRExpr *off = binop(b, Iop_Or64, binop(b, Iop_Xor64, line, tag), binop(b, Iop_Xor64, last, tag));
   off = binop(b, Iop_Or64, off, load64(b, mkIRExpr_HWord((HWord)&sampling)));
   return assign(b, Ity_I1, IRExpr_Binop(Iop_CmpNE64, off, number64(0)));
}

/* Returns the access's place in the piece. */
static UInt emit(Build *b, IRExpr *address, Int size, Load *load, IRExpr *guard)
{
   Access *access = describe(sizeof(Access));
   UInt place = guard ? NO_PLACE : b->place_count++;
   access->place = place < MAX_PIECE_ACCESSES ? place : NO_PLACE;
   access->counted = b->counted;
   access->index = b->index;
   access->size = size;
   access->site = b->site;
   access->store = load == NULL;
   access->block = b->block;
   access->address = load ? load->address : sources_of(b, address);
   access->load = load;
   if (load)
      addStmtToIRSB(b->out, IRStmt_Store(Iend_LE, mkIRExpr_HWord((HWord)&load->touched), address));
   IRExpr **arguments = mkIRExprVec_2(address, mkIRExpr_HWord((HWord)access));
   IRDirty *call = exact ? unsafeIRDirty_0_N(2, "on_exact_access", VG_(fnptr_to_fnentry)(&on_exact_access), arguments)
                         : unsafeIRDirty_0_N(2, "on_access", VG_(fnptr_to_fnentry)(&on_access), arguments);
   if (guard)
      call->guard = guard;
   else if (!exact && clo_l1_bytes)
      call->guard = slow_path(b, address, size);
   addStmtToIRSB(b->out, IRStmt_Dirty(call));
   if (exact)
      return access->place;
   if (guard) {
      /* An access that may not happen counts if it does. */
      IRExpr *where = mkIRExpr_HWord((HWord)&accesses);
      IRExpr *one = assign(b, Ity_I64, IRExpr_Unop(Iop_1Uto64, guard));
      IRExpr *sum = binop(b, Iop_Add64, load64(b, where), one);
      addStmtToIRSB(b->out, IRStmt_Store(Iend_LE, where, sum));
   } else
      b->made++;
   return access->place;
}

static void flush_registers(Build *b)
{
   for (UInt number = 0; b->changed; number++, b->changed >>= 1) {
      if (!(b->changed & 1))
         continue;
      Sources *described = NULL;
      if (b->registers[number].count) {
         described = describe(sizeof(Sources));
         *described = b->registers[number];
      }
      IRExpr *where = mkIRExpr_HWord((HWord)&written[number]);
      addStmtToIRSB(b->out, IRStmt_Store(Iend_LE, where, mkIRExpr_HWord((HWord)described)));
   }
}

static void flush_load(Build *b)
{
   if (b->load_address) {
      UInt place = emit(b, b->load_address, b->load_size, b->load, b->load_guard);
      if (b->load_step)
         b->steps[b->load_step - 1].place = place;
   }
   b->load_address = NULL;
   b->load_step = 0;
}

static void add_to(Build *b, ULong *counter, UWord *pending)
{
   if (*pending == 0)
      return;
   IRExpr *where = mkIRExpr_HWord((HWord)counter);
   IRExpr *sum = binop(b, Iop_Add64, load64(b, where), number64(*pending));
   addStmtToIRSB(b->out, IRStmt_Store(Iend_LE, where, sum));
   *pending = 0;
}

/* Before control may leave: adds what is pending to the counters. */
static void flush_count(Build *b)
{
   flush_load(b);
   flush_registers(b);
   add_to(b, &instructions, &b->counted);
   add_to(b, &accesses, &b->made);
}

/* A load into a temporary, IRTemp_INVALID for none. Returns the load, from which its value comes. */
static Load *add_load(Build *b, IRExpr *address, Int size, IRExpr *guard, IRTemp into, UInt latency)
{
   flush_load(b);
   if (into != IRTemp_INVALID) {
      Step *step = add_step(b, LOADS, latency, FIRST_TEMP + into);
      step->source[0] = value_of(address);
      step->source[1] = guard ? value_of(guard) : 0;
      b->load_step = b->step_count;
   }
   b->load_address = address;
   b->load_size = size;
   b->load_guard = guard;
   b->load = describe(sizeof(Load));
   b->load->block = b->block;
   b->load->address = sources_of(b, address);
   return b->load;
}

static void set_loaded(Build *b, IRTemp temp, Load *load)
{
   Sources sources = {1, {(ULong)(Addr)load}};
   b->temps[temp] = sources;
}

/* A general register gets a value: after this instruction, it remembers what that depends on. */
static void put_register(Build *b, Int offset, const IRExpr *data)
{
   Int number = register_of(offset);
   if (number < 0)
      return;
   Sources sources = sources_of(b, data);
   Sources *before = &b->registers[number];
   if (sources.count == before->count && VG_(memcmp)(sources.of, before->of, sources.count * sizeof(ULong)) == 0)
      return; /* advanced, or written back */
   *before = sources;
   b->changed |= 1u << number;
}

/* A word of memory gets a value, and remembers what that depends on. */
static void keep_word(Build *b, IRExpr *address, const IRExpr *data)
{
   Sources sources = sources_of(b, data);
   IRExpr *value = number64(0);
   if (sources.count == 1 && is_register(sources.of[0]))
      /* What the register holds now is not what it will hold when the word is loaded. */
      value = load64(b, mkIRExpr_HWord((HWord)&written[sources.of[0] - 1]));
   else if (sources.count) {
      Sources *described = describe(sizeof(Sources));
      for (UInt i = 0; i < sources.count; i++)
         if (!is_register(sources.of[i]))
            add_source(described, sources.of[i]);
      value = mkIRExpr_HWord((HWord)described);
   }
   IRExpr *place = binop(b, Iop_And64, binop(b, Iop_Shl64, address, number8(1)), number64(((1 << KEPT_BITS) - 1) << 4));
   place = binop(b, Iop_Add64, place, mkIRExpr_HWord((HWord)kept));
   addStmtToIRSB(b->out, IRStmt_Store(Iend_LE, place, address));
   IRExpr *behind = binop(b, Iop_Add64, place, number64(offsetof(__typeof__(kept[0]), value)));
   addStmtToIRSB(b->out, IRStmt_Store(Iend_LE, behind, value));
}

static void add_store(Build *b, IRExpr *address, IRExpr *data, Int size, IRExpr *guard)
{
   UInt load_step = 0;
   if (b->load_address && !b->load_guard && !guard && b->load_size == size && eqIRAtom(b->load_address, address)) {
      b->load_address = NULL; /* one access, a store */
      load_step = b->load_step;
   }
   flush_load(b);
   Step *step = add_step(b, STORES, 0, 0);
   step->source[0] = value_of(address);
   step->source[1] = data ? value_of(data) : 0;
   step->place = emit(b, address, size, NULL, guard);
   if (load_step)
      b->steps[load_step - 1].place = step->place;
}

static void add_accesses(Build *b, IRTypeEnv *types, IRStmt *st)
{
   switch (st->tag) {
   case Ist_WrTmp: {
      IRExpr *data = st->Ist.WrTmp.data;
      if (data->tag == Iex_Load)
         set_loaded(b, st->Ist.WrTmp.tmp,
                    add_load(b, data->Iex.Load.addr, sizeofIRType(data->Iex.Load.ty), NULL, st->Ist.WrTmp.tmp,
                             LOAD_LATENCY));
      else {
         b->temps[st->Ist.WrTmp.tmp] = sources_of_data(b, data);
         add_value(b, types, st->Ist.WrTmp.tmp, data);
      }
      break;
   }
   case Ist_Put:
      put_register(b, st->Ist.Put.offset, st->Ist.Put.data);
      add_put(b, types, st->Ist.Put.offset, st->Ist.Put.data);
      break;
   case Ist_MBE:
      add_step(b, FENCES, 0, 0);
      break;
   case Ist_Store:
      add_store(b, st->Ist.Store.addr, st->Ist.Store.data, sizeofIRType(typeOfIRExpr(types, st->Ist.Store.data)), NULL);
      if (typeOfIRExpr(types, st->Ist.Store.data) == Ity_I64 || typeOfIRExpr(types, st->Ist.Store.data) == Ity_I32)
         keep_word(b, st->Ist.Store.addr, st->Ist.Store.data);
      break;
   case Ist_LoadG: {
      IRLoadG *load = st->Ist.LoadG.details;
      IRType type = Ity_INVALID, wide = Ity_INVALID;
      typeOfIRLoadGOp(load->cvt, &wide, &type);
      set_loaded(b, load->dst, add_load(b, load->addr, sizeofIRType(type), load->guard, load->dst, LOAD_LATENCY));
      break;
   }
   case Ist_StoreG: {
      IRStoreG *store = st->Ist.StoreG.details;
      add_store(b, store->addr, store->data, sizeofIRType(typeOfIRExpr(types, store->data)), store->guard);
      break;
   }
   case Ist_Dirty: {
      IRDirty *call = st->Ist.Dirty.details;
      if (call->mFx == Ifx_Read || call->mFx == Ifx_Modify)
         add_load(b, call->mAddr, call->mSize, NULL, IRTemp_INVALID, 0);
      if (call->mFx == Ifx_Write || call->mFx == Ifx_Modify)
         add_store(b, call->mAddr, NULL, call->mSize, NULL);
      if (call->tmp != IRTemp_INVALID)
         add_step(b, COMPUTES, 1, FIRST_TEMP + call->tmp);
      break;
   }
   case Ist_CAS: {
      IRCAS *cas = st->Ist.CAS.details;
      Int size = sizeofIRType(typeOfIRExpr(types, cas->dataLo)) * (cas->dataHi ? 2 : 1);
      set_loaded(b, cas->oldLo, add_load(b, cas->addr, size, NULL, cas->oldLo, LOCK_LATENCY));
      add_store(b, cas->addr, cas->dataLo, size, NULL);
      break;
   }
   case Ist_LLSC:
      if (st->Ist.LLSC.storedata == NULL)
         set_loaded(b, st->Ist.LLSC.result,
                    add_load(b, st->Ist.LLSC.addr, sizeofIRType(typeOfIRTemp(types, st->Ist.LLSC.result)), NULL,
                             st->Ist.LLSC.result, LOCK_LATENCY));
      else
         add_store(b, st->Ist.LLSC.addr, st->Ist.LLSC.storedata,
                   sizeofIRType(typeOfIRExpr(types, st->Ist.LLSC.storedata)), NULL);
      break;
   default:
      break;
   }
}

/* Ends the piece, of which `outcome` is known when it runs. */
static void end_piece(Build *b, UInt end, IRExpr *outcome, const IRExpr *condition, ULong untaken)
{
   Piece *piece = describe(sizeof(Piece) + b->step_count * sizeof(Step));
   piece->count = b->step_count;
   for (UInt i = 0; i < b->step_count; i++)
      piece->instructions += b->steps[i].kind == BEGINS;
   piece->end = end;
   piece->condition = condition ? value_of(condition) : 0;
   piece->site = b->behind ^ (b->behind >> 32);
   piece->untaken = untaken;
   VG_(memcpy)(piece->step, b->steps, b->step_count * sizeof(Step));
   IRExpr **arguments = mkIRExprVec_2(mkIRExpr_HWord((HWord)piece), outcome);
   IRDirty *call = unsafeIRDirty_0_N(2, "on_piece", VG_(fnptr_to_fnentry)(&on_piece), arguments);
   IRExpr *samples = load64(b, mkIRExpr_HWord((HWord)&sampling));
   call->guard = assign(b, Ity_I1, IRExpr_Binop(Iop_CmpNE64, samples, number64(0)));
   addStmtToIRSB(b->out, IRStmt_Dirty(call));
   b->step_count = b->place_count = 0;
}

/* Before control may leave by an exit. */
static void end_piece_at_exit(Build *b, IRStmt *st)
{
   Bool branches = st->Ist.Exit.jk == Ijk_Boring || st->Ist.Exit.jk == Ijk_Call;
   IRExpr *outcome = assign(b, Ity_I64, IRExpr_Unop(Iop_1Uto64, st->Ist.Exit.guard));
   Bool inverted = st->Ist.Exit.dst->tag == Ico_U64 && st->Ist.Exit.dst->Ico.U64 == b->behind;
   end_piece(b, branches ? BRANCHES : STAYS, outcome, st->Ist.Exit.guard, inverted);
}

static void end_last_piece(Build *b)
{
   IRExpr *next = b->out->next;
   Bool jumps = next->tag == Iex_RdTmp && (b->out->jumpkind == Ijk_Boring || b->out->jumpkind == Ijk_Call);
   end_piece(b, jumps ? JUMPS : STAYS, next, next, 0);
}

/* A hash of the instruction's address, never 0. */
static UShort site_of(Addr address)
{
   UShort site = (address * 0x9e3779b97f4a7c15ULL) >> 48;
   return site ? site : 1;
}

static IRSB *instrument(VgCallbackClosure *closure, IRSB *in, const VexGuestLayout *layout,
                        const VexGuestExtents *extents, const VexArchInfo *arch, IRType guest_word, IRType host_word)
{
   for (Int i = 0; i < in->stmts_used; i++)
      translated += in->stmts[i]->tag == Ist_IMark;
   if (mode == OFF || mode == WAITING || mode == PAUSED)
      return in;
   Build b = {.out = deepCopyIRSBExceptStmts(in)};
   b.block = describe(sizeof(Block));
   b.temps = VG_(calloc)("cm.temps", in->tyenv->types_used + 1, sizeof(Sources));
   b.is_value = VG_(calloc)("cm.values", in->tyenv->types_used + 1, sizeof(Bool));
   b.steps = VG_(malloc)("cm.steps", MAX_STEPS * sizeof(Step));
   know_values(FIRST_TEMP + in->tyenv->types_used);
   find_values(&b, in);
   for (UInt number = 0; number < REGISTERS; number++)
      add_source(&b.registers[number], number + 1);
   Int i = 0;
   /* What stands before the first instruction (self-checks) is none of the program's. */
   for (; i < in->stmts_used && in->stmts[i]->tag != Ist_IMark; i++)
      addStmtToIRSB(b.out, in->stmts[i]);
   IRExpr *begin = mkIRExpr_HWord((HWord)&b.block->begin);
   IRExpr *before = load64(&b, begin);
   addStmtToIRSB(b.out, IRStmt_Store(Iend_LE, mkIRExpr_HWord((HWord)&b.block->before), before));
   IRExpr *now = load64(&b, mkIRExpr_HWord((HWord)&instructions));
   addStmtToIRSB(b.out, IRStmt_Store(Iend_LE, begin, now));
   for (; i < in->stmts_used; i++) {
      IRStmt *st = in->stmts[i];
      if (st->tag == Ist_IMark) {
         flush_load(&b);
         flush_registers(&b);
         b.counted++;
         b.index++;
         b.site = site_of(st->Ist.IMark.addr);
         b.behind = st->Ist.IMark.addr + st->Ist.IMark.len;
         add_step(&b, BEGINS, 0, (UInt)(st->Ist.IMark.addr >> 6));
      } else if (st->tag == Ist_Exit) {
         flush_count(&b);
         end_piece_at_exit(&b, st);
      } else
         add_accesses(&b, in->tyenv, st);
      addStmtToIRSB(b.out, st);
   }
   flush_count(&b);
   end_last_piece(&b);
   VG_(free)(b.temps);
   VG_(free)(b.is_value);
   VG_(free)(b.steps);
   return b.out;
}

/* ---- Threads and processes ---- */
static void start_thread(ThreadId tid)
{
   if (tid >= threads_size) {
      UInt size = tid + 64;
      UInt was_current = current ? current - threads : 0;
      threads = VG_(realloc)("cm.threads", threads, size * sizeof(Thread));
      VG_(memset)(threads + threads_size, 0, (size - threads_size) * sizeof(Thread));
      current = current ? threads + was_current : NULL;
      threads_size = size;
   }
   Thread *thread = &threads[tid];
   VG_(memset)(thread, 0, sizeof(Thread));
   thread->live = True;
   thread->number = next_number++;
   thread->l1 = l1_new();
}

/* Puts the running thread's counters away; what it left in the chunk goes out under its name. */
static void leave_thread(void)
{
   if (!current)
      return;
   if (chunk_records)
      send(0);
   current->instructions = instructions;
   current->accesses = accesses;
   VG_(memcpy)(current->written, written, sizeof(written));
   seen_elsewhere += accesses;
   current = NULL;
   accesses = instructions = 0;
   sampling = 0;
}

static void enter_thread(Thread *thread)
{
   current = thread;
   VG_(memcpy)(written, thread->written, sizeof(written));
   current_l1 = thread->l1;
   instructions = thread->instructions;
   accesses = thread->accesses;
   seen_elsewhere -= accesses;
}

static void end_rest(void);

/* Time is looked at when a thread begins a turn, of 100 000 blocks at most. While it waits, the program runs without our
   code in it, which is as fast as Valgrind is. */
static void look_at_time(void)
{
   static Bool started = False;
   if (!started)
      begun_ms = VG_(read_millisecond_timer)();
   started = True;
   if (mode == WAITING && VG_(read_millisecond_timer)() - begun_ms >= clo_skip_ms) {
      begun_ms = VG_(read_millisecond_timer)();
      mode = clo_burst ? PAUSED : clo_skip ? SKIPPING : RECORDING;
      discard_due = True;
   }
   if ((mode == RECORDING || mode == PAUSED || mode == RESTING) && clo_max_ms &&
       VG_(read_millisecond_timer)() - begun_ms >= clo_max_ms) {
      end_rest();
      send_branch_loads();
      send(FLAG_MAX);
      switch_off();
      if (clo_stop)
         VG_(exit)(0);
   }
}

/* ---- Bursts ---- */
/* Blocks at which the pause ends or the burst began, and accesses at which the burst ends. */
static ULong pause_end, burst_begin, burst_end;

/* Uniform from 0 to 1 in 2^32 steps; seeded by a constant, so that the same run has the same bursts. */
static ULong draw(void)
{
   static ULong state = 0x9e3779b97f4a7c15ULL;
   state = state * 6364136223846793005ULL + 1442695040888963407ULL;
   return state >> 32;
}

/* A pause without our code is fast, but what runs in it has to be translated bare, and again with our code for the next burst.
   If a program's code is large, as a compiler's, that takes longer than to leave our code where it is, at rest. Nanoseconds in
   which an instruction is translated, and the share of a burst's time that bare code saves of one at rest. They are fits of the
   CPU time of nine runs (cc1 of three sizes, Python, perl, xz, gzip, true) to translated instructions and executed blocks, on a
   guest of an AMD EPYC: 8.1 us an instruction bare, 22.6 at rest and 23.7 recording; 20, 91 and 129 ns a block. */
#define BARE_TRANSLATION_NS 8000ULL
#define OUR_TRANSLATION_NS 23000ULL
#define SAVED_PERCENT 55ULL
/* Instructions up to which a first pause without our code costs little, whatever the program is: by the figures above, their
   two translations take 1.5 s. */
#define SMALL_CODE 50000ULL

static ULong burst_begin_ms, burst_begin_translated;

static Bool bare_pause_pays(ULong burst_blocks, ULong pause_blocks)
{
   ULong burst_ns = (VG_(read_millisecond_timer)() - burst_begin_ms) * 1000000;
   ULong translation_ns = (translated - burst_begin_translated) * OUR_TRANSLATION_NS;
   ULong run_ns = burst_ns > translation_ns ? burst_ns - translation_ns : 0;
   double saved_ns = (double)run_ns * pause_blocks / (burst_blocks + 1) * SAVED_PERCENT / 100;
   return saved_ns > (double)translated * (BARE_TRANSLATION_NS + OUR_TRANSLATION_NS);
}

static void begin_rest(void)
{
   mode = RESTING;
   sampling = 0;
   Thread *running = current;
   leave_thread();
   for (UInt i = 0; i < threads_size; i++) {
      threads[i].resting_instructions = threads[i].instructions;
      threads[i].resting_accesses = threads[i].accesses;
   }
   if (running)
      enter_thread(running);
}

/* What a thread that is not running did while our code was at rest is not in the recording. */
static void leave_rest_out(Thread *thread)
{
   ULong passed = thread->instructions - thread->resting_instructions;
   thread->window_instructions += passed;
   thread->recorded_at += passed;
   thread->resting_instructions = thread->instructions;
   passed = thread->accesses - thread->resting_accesses;
   thread->window_accesses += passed;
   seen_elsewhere -= passed;
   thread->resting_accesses = thread->accesses;
}

static void end_rest(void)
{
   if (mode != RESTING)
      return;
   Thread *running = current;
   leave_thread();
   for (UInt i = 0; i < threads_size; i++)
      if (threads[i].live)
         leave_rest_out(&threads[i]);
   if (running)
      enter_thread(running);
}

/* Pauses are drawn, half to one and a half times as long as the share asks for: no period of the program matches them.
   They are counted in blocks, of which the core keeps count, also while the program runs without our code. */
static void pause(ULong now, ULong burst_blocks)
{
   ULong mean = burst_blocks * (100 - clo_burst_percent) / clo_burst_percent;
   ULong blocks = mean / 2 + (ULong)((double)mean * draw() / 4294967296.0);
   pause_end = now + blocks;
   if (!burst_end || bare_pause_pays(burst_blocks, blocks)) {
      mode = PAUSED;
      discard_due = True;
   } else
      begin_rest();
}

static void look_at_burst(ULong now)
{
   if ((mode == PAUSED || mode == RESTING) && now >= pause_end) {
      end_rest();
      if (mode == PAUSED)
         discard_due = True;
      mode = RECORDING;
      burst_begin = now;
      burst_begin_ms = VG_(read_millisecond_timer)();
      burst_begin_translated = discard_due ? 0 : translated;
      burst_end = seen_elsewhere + accesses + clo_burst;
      send(FLAG_BURST);
   } else if (mode == RECORDING && seen_elsewhere + accesses >= burst_end) {
      send(0);
      pause(now, now - burst_begin);
   } else if (mode == PAUSED && !burst_end && translated > SMALL_CODE) {
      /* The first pause, of which nothing was known. */
      begin_rest();
      discard_due = True;
   }
}

/* The descriptions of discarded translations, one of which may still run in this turn: the core finds a thread's next block
   before it says that the turn begins, and a block that jumps to itself stays. */
static Arena *retired;

static void forget_descriptions(void)
{
   while (retired) {
      Arena *next = retired->next;
      VG_(free)(retired);
      retired = next;
   }
   VG_(memset)(written, 0, sizeof(written));
   VG_(memset)(kept, 0, sizeof(kept));
   VG_(memset)(brought, 0, sizeof(brought));
   for (UInt i = 0; i < threads_size; i++)
      VG_(memset)(threads[i].written, 0, sizeof(written));
}

static void on_run(ThreadId tid, ULong blocks)
{
   if (UNLIKELY(retired != NULL))
      forget_descriptions();
   if (UNLIKELY(mode == WAITING || clo_max_ms))
      look_at_time();
   if (UNLIKELY(clo_burst))
      look_at_burst(blocks);
   if (UNLIKELY(mode != OFF && exact != near_an_end())) {
      exact = !exact;
      discard_due = True;
   }
   if (UNLIKELY(discard_due)) {
      Bool before = VG_(ok_to_discard_translations);
      VG_(ok_to_discard_translations) = True;
      VG_(discard_translations_safely)((Addr)0x1000, ~(SizeT)0xfff, "cachemate");
      VG_(ok_to_discard_translations) = before;
      retired = arena;
      arena = NULL;
      discard_due = False;
      translated = 0;
      sampling = 0;
   }
   if (tid >= threads_size || !threads[tid].live)
      start_thread(tid);
   if (current != &threads[tid]) {
      leave_thread();
      enter_thread(&threads[tid]);
      /* Every thread of the client is one of the kernel's, and this is called on it. */
      current->os_thread = VG_(gettid)();
   }
   if (mode == RECORDING && !sampling && blocks >= next_sample) {
      begin_sample();
      next_sample = blocks + SAMPLE_PERIOD;
   }
}

static void on_create(ThreadId parent, ThreadId child) { start_thread(child); }

static void on_exit_thread(ThreadId tid)
{
   Thread *thread = tid < threads_size ? &threads[tid] : NULL;
   if (!thread || !thread->live)
      return;
   if (current != thread) {
      leave_thread();
      enter_thread(thread);
   }
   if (mode == RESTING) {
      leave_thread();
      leave_rest_out(thread);
      enter_thread(thread);
   }
   if (mode == RECORDING || mode == PAUSED || mode == RESTING)
      send(0);
   leave_thread();
   if (thread->l1)
      VG_(free)(thread->l1);
   thread->live = False;
}

static void send_start(void)
{
   UInt limit = CHUNK_BYTES - 1;
   chunk_used = sizeof(ChunkHead);
   chunk_records = 0;
   Int words = VG_(sizeXA)(VG_(args_for_client));
   for (Int i = -1; i < words; i++) {
      const HChar *word = i < 0 ? VG_(args_the_exename) : *(HChar **)VG_(indexXA)(VG_(args_for_client), i);
      for (; *word && chunk_used < limit; word++)
         chunk[chunk_used++] = *word;
      if (chunk_used < limit)
         chunk[chunk_used++] = 0;
   }
   send(FLAG_START);
}

static void on_fork_child(ThreadId tid)
{
   chunk_used = sizeof(ChunkHead);
   chunk_records = 0;
   chunk_address = 0;
   if (!clo_follow || mode == OFF) {
      VG_(close)(fifo);
      fifo = -1;
      switch_off();
      return;
   }
   /* Only the thread that forked lives on; its filter's content is its parent's, as a copy of the cache would be. */
   my_pid = VG_(getpid)();
   next_number = 0;
   for (UInt i = 0; i < threads_size; i++)
      if (i != tid && threads[i].live) {
         if (threads[i].l1)
            VG_(free)(threads[i].l1);
         threads[i].live = False;
      }
   current = &threads[tid];
   current->number = next_number++;
   current->os_thread = VG_(gettid)();
   current->recorded_at = current->window_instructions = current->window_accesses = 0;
   current->inherited_records = current->records;
   VG_(memset)(written, 0, sizeof(written));
   VG_(memset)(kept, 0, sizeof(kept));
   VG_(memset)(brought, 0, sizeof(brought));
   VG_(memset)(&core_counts, 0, sizeof(core_counts));
   VG_(memset)(branch_loads, 0, sizeof(branch_loads));
   sampling = 0;
   instructions = accesses = seen_elsewhere = 0;
   if (mode != WAITING)
      mode = clo_skip ? SKIPPING : RECORDING;
   send_start();
}

/* ---- Start and end ---- */
static Bool option(const HChar *arg)
{
   if (VG_STR_CLO(arg, "--cm-fifo", clo_fifo)) {}
   else if (VG_BINT_CLO(arg, "--cm-skip", clo_skip, 0, 0x7fffffffffffffffLL)) {}
   else if (VG_BINT_CLO(arg, "--cm-max", clo_max, 0, 0x7fffffffffffffffLL)) {}
   else if (VG_BINT_CLO(arg, "--cm-skip-ms", clo_skip_ms, 0, 1000000000LL)) {}
   else if (VG_BINT_CLO(arg, "--cm-max-ms", clo_max_ms, 0, 1000000000LL)) {}
   else if (VG_BINT_CLO(arg, "--cm-l1-bytes", clo_l1_bytes, 0, 64 << 20)) {}
   else if (VG_BINT_CLO(arg, "--cm-l1-ways", clo_l1_ways, 1, 64)) {}
   else if (VG_BINT_CLO(arg, "--cm-l1-line", clo_l1_line, 16, 4096)) {}
   else if (VG_BINT_CLO(arg, "--cm-burst", clo_burst, 0, 0x7fffffffffffffffLL)) {}
   else if (VG_BINT_CLO(arg, "--cm-burst-percent", clo_burst_percent, 1, 99)) {}
   else if (VG_BOOL_CLO(arg, "--cm-follow", clo_follow)) {}
   else if (VG_BOOL_CLO(arg, "--cm-stop-at-max", clo_stop)) {}
   else
      return False;
   return True;
}

static void usage(void)
{
   VG_(printf)("    --cm-fifo=<file>          write chunks to this FIFO (required)\n"
               "    --cm-skip=<n>             pass over the first n data accesses [0]\n"
               "    --cm-max=<n>              then record n data accesses and go on unrecorded [all]\n"
               "    --cm-skip-ms=<n>          first let the program run n ms without our code [0]\n"
               "    --cm-max-ms=<n>           record for n ms and go on unrecorded, 0 = to the end [0]\n"
               "    --cm-burst=<n>            record bursts of n data accesses, 0 = all [0]\n"
               "    --cm-burst-percent=<n>    share of the run in bursts; pauses run without our code [10]\n"
               "    --cm-stop-at-max=no|yes   end the program there instead [no]\n"
               "    --cm-l1-bytes=<n>         size of the L1 filter, 0 = none [0]\n"
               "    --cm-l1-ways=<n>          its ways [8]\n"
               "    --cm-l1-line=<n>          its line in bytes [64]\n"
               "    --cm-follow=no|yes        record forked children too [no]\n");
}

static void debug_usage(void) { VG_(printf)("    (none)\n"); }

static Int log2_of(Long value)
{
   Int bits = 0;
   while (1LL << bits < value)
      bits++;
   return bits;
}

static void post_clo_init(void)
{
   if (!clo_fifo)
      VG_(fmsg_bad_option)("--cm-fifo", "the FIFO to write to is missing\n");
   if (clo_l1_bytes) {
      Long sets = clo_l1_bytes / (clo_l1_ways * clo_l1_line);
      if (sets < 1 || sets * clo_l1_ways * clo_l1_line != clo_l1_bytes || (sets & (sets - 1)) ||
          (clo_l1_line & (clo_l1_line - 1)))
         VG_(fmsg_bad_option)("--cm-l1-bytes", "line and number of sets must be powers of two\n");
      l1_ways = clo_l1_ways;
      l1_line_bits = log2_of(clo_l1_line);
      l1_set_mask = sets - 1;
   }
   SysRes opened = VG_(open)(clo_fifo, VKI_O_WRONLY, 0);
   if (sr_isError(opened))
      VG_(fmsg_bad_option)("--cm-fifo", "'%s' cannot be opened\n", clo_fifo);
   fifo = VG_(safe_fd)(sr_Res(opened));
   my_pid = VG_(getpid)();
   know_values(FIRST_TEMP);
   send_start();
   mode = clo_skip_ms ? WAITING : clo_skip ? SKIPPING : RECORDING;
   /* A block makes some two accesses; the first burst comes half a pause or more after the start. */
   if (clo_burst && mode == RECORDING)
      pause(0, clo_burst / 2);
   exact = near_an_end();
   if (clo_max == 0) {
      send(FLAG_MAX);
      switch_off();
   }
}

static void fini(Int exit_code)
{
   if (mode != RECORDING && mode != PAUSED && mode != RESTING)
      return;
   end_rest();
   send_branch_loads();
   send(FLAG_END);
   /* The others that still live, at their last switch. */
   leave_thread();
   for (UInt i = 0; i < threads_size; i++)
      if (threads[i].live) {
         enter_thread(&threads[i]);
         send(FLAG_END);
         leave_thread();
      }
}

static void pre_clo_init(void)
{
   VG_(details_name)("cachemate");
   VG_(details_version)("1");
   VG_(details_description)("a recorder of data accesses");
   VG_(details_copyright_author)("Copyright (C) 2026, and GNU GPL'd, by the cachemate authors.");
   VG_(details_bug_reports_to)("the cachemate project");
   VG_(basic_tool_funcs)(post_clo_init, instrument, fini);
   VG_(needs_command_line_options)(option, usage, debug_usage);
   VG_(track_start_client_code)(on_run);
   VG_(track_pre_thread_ll_create)(on_create);
   VG_(track_pre_thread_ll_exit)(on_exit_thread);
   VG_(atfork)(NULL, NULL, on_fork_child);
}

VG_DETERMINE_INTERFACE_VERSION(pre_clo_init)
