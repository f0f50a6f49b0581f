/* lab-phase NAME SECONDS GROUP NUMBER...: programs of /lab/programs at once, until all have ended or the time is over.
 * After first:SECONDS, program i stays on CPU i. All but the first run lines of /lab/co-runners, start HEAD_START_US
 * earlier, and again and again until the first has ended. Sleeps meanwhile, so that it takes neither CPU time nor cache
 * from them. Prints a line when each is started, and at the end one with its pid, seconds, whether it ended, exit code,
 * and the last line that it printed. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROGRAMS_AT_MOST = 256, LAST_LINE_BYTES = 200, SHELL_CANNOT_EXECUTE = 126, HEAD_START_US = 100000 };

static const char FIRST[] = "first:";

struct program {
	int number, pid, status, is_running, was_killed;
	double start, end;
	char *line;
};
static struct program programs[PROGRAMS_AT_MOST];
static int count;

static _Noreturn void fail(const char *what)
{
	fprintf(stderr, "lab-phase: %s: %s\n", what, strerror(errno));
	exit(2);
}

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The command line of that number: the file has one in each line. */
static char *command_line(const char *path, int number)
{
	char *line = NULL;
	size_t size = 0;
	FILE *f = fopen(path, "r");
	for (int i = 0; f && i <= number; i++)
		if (getline(&line, &size, f) < 0)
			fail(path);
	if (!f)
		fail(path);
	fclose(f);
	line[strcspn(line, "\n")] = 0;
	return line;
}

static void output_name(char *name, size_t size, int number)
{
	snprintf(name, size, "/lab/%d.out", number);
}

/* On a CPU of its own, so that no program waits for another one. */
static bool stays_on(int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	return !sched_setaffinity(0, sizeof set, &set);
}

/* In a process group of its own, so that its children end with it. */
static void start(int i, bool until_first, const char *group, const sigset_t *old)
{
	char name[64], shell_line[8192];
	struct program *p = &programs[i];
	output_name(name, sizeof name, p->number);
	snprintf(shell_line, sizeof shell_line, until_first && i > 0 ? "while :; do %s; done" : "exec %s", p->line);
	p->start = now_s();
	p->pid = fork();
	p->is_running = 1;
	if (p->pid < 0)
		fail("fork");
	if (p->pid)
		return;
	int out = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644), procs = open(group, O_WRONLY);
	setpgid(0, 0);
	sigprocmask(SIG_SETMASK, old, NULL);
	if (out < 0 || procs < 0 || (until_first && !stays_on(i)) || dprintf(procs, "%d", getpid()) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0 || chdir("/programs"))
		_exit(SHELL_CANNOT_EXECUTE);
	execl("/bin/sh", "sh", "-c", shell_line, NULL);
	_exit(SHELL_CANNOT_EXECUTE);
}

static void reap(void)
{
	int status, pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
		for (int i = 0; i < count; i++)
			if (programs[i].pid == pid && programs[i].is_running) {
				programs[i].is_running = 0;
				programs[i].status = status;
				programs[i].end = now_s();
			}
}

static int running(void)
{
	int still = 0;
	for (int i = 0; i < count; i++)
		still += programs[i].is_running;
	return still;
}

/* Programs that are still running are killed; the time of each ends with its own kill. */
static void kill_all(void)
{
	for (int i = 0; i < count; i++)
		if (programs[i].is_running) {
			programs[i].was_killed = 1;
			kill(-programs[i].pid, SIGKILL);
			programs[i].end = now_s();
		}
	for (int i = 0; i < count; i++)
		if (programs[i].is_running && waitpid(programs[i].pid, &programs[i].status, 0) == programs[i].pid)
			programs[i].is_running = 0;
}

/* The last line of a program's output that is not empty, in printable ASCII. */
static void last_line(const struct program *p, char *line, size_t size)
{
	char name[64], tail[4096];
	output_name(name, sizeof name, p->number);
	int file = open(name, O_RDONLY);
	off_t bytes = file < 0 ? 0 : lseek(file, 0, SEEK_END);
	ssize_t got = file < 0 ? 0 : pread(file, tail, sizeof tail, bytes > (off_t)sizeof tail ? bytes - (off_t)sizeof tail : 0);
	size_t end = got > 0 ? (size_t)got : 0, begin;
	while (end > 0 && isspace((unsigned char)tail[end - 1]))
		end--;
	for (begin = end; begin > 0 && tail[begin - 1] != '\n';)
		begin--;
	snprintf(line, size, "%.*s", (int)(end - begin), tail + begin);
	for (char *c = line; *c; c++)
		if (!isprint((unsigned char)*c))
			*c = ' ';
	if (file >= 0)
		close(file);
}

int main(int argc, char **argv)
{
	sigset_t child, old;
	char group[256], line[LAST_LINE_BYTES];
	if (argc < 5 || argc - 4 > PROGRAMS_AT_MOST) {
		fprintf(stderr, "lab-phase: found %d arguments, expected NAME SECONDS GROUP and 1 to %d numbers\n", argc - 1,
			PROGRAMS_AT_MOST);
		return 2;
	}
	bool until_first = !strncmp(argv[2], FIRST, strlen(FIRST));
	double seconds = atof(argv[2] + (until_first ? strlen(FIRST) : 0));
	snprintf(group, sizeof group, "%s/cgroup.procs", argv[3]);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, &old);
	for (count = 0; count < argc - 4; count++) {
		struct program *p = &programs[count];
		p->number = atoi(argv[4 + count]);
		p->line = command_line(until_first && count > 0 ? "/lab/co-runners" : "/lab/programs", p->number);
		printf("PHASE\t%s\t%s\n", argv[1], p->line);
	}
	fflush(stdout);
	for (int i = count; i-- > 0;) {
		if (until_first && i == 0 && count > 1)
			usleep(HEAD_START_US);
		start(i, until_first, group, &old);
	}
	for (double over = now_s() + seconds, left; (until_first ? programs[0].is_running : running()) && (left = over - now_s()) > 0; reap()) {
		struct timespec wait = { (time_t)left, (long)((left - (double)(time_t)left) * 1e9) };
		sigtimedwait(&child, NULL, &wait);
	}
	kill_all();
	for (int i = 0; i < count; i++) {
		const struct program *p = &programs[i];
		last_line(p, line, sizeof line);
		printf("PROGRAM\t%s\t%d\t%s\t%d\t%.4f\t%s\t%d\t%s\n", argv[1], p->number, p->line, p->pid, p->end - p->start,
		       p->was_killed ? "no" : "yes",
		       WIFEXITED(p->status) ? WEXITSTATUS(p->status) : 128 + WTERMSIG(p->status), line);
	}
	return 0;
}
