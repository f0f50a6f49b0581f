# The two commands of the README are `make demo` and `make test`; the others are for people who work on cachemate.
# Every target first sees to it that the machine has what it needs (scripts/setup.sh).

CARGO ?= cargo
RELEASE = target/release/cachemate

.PHONY: demo test lint build bench repro faults kill soak services kubernetes slurm live lab install image deb deb-daemon rpm deb-test dist figures wheel nightly fuzz clean help

help:
	@echo 'make demo     record real programs here, predict which slow each other down, and plan who shares a cache'
	@echo 'make test     format, lint, tidy, unit, property, end-to-end and doc tests: after each edit'
	@echo '.ci/run       make test, kills, a sample of every experiment, the wheel, the lab: before a change lands'
	@echo 'make nightly  every question in full: experiments, kills, faults, soak, fuzzing, lab, Slurm (hours)'
	@echo 'make repro    every result of the papers, a small run of each (REPRO=--quick; --sample; empty for the full run)'
	@echo 'make figures  the picture of each page of results, by quick runs, and of the crates'
	@echo 'make bench    speed: ratios against textbook engines, in one run'
	@echo 'make faults   a fault at every call of a managed run, and of the real restore: is anything lost?'
	@echo 'make kill     kill -9 at KILLS random moments (200) of a managed run: is everything as before?'
	@echo 'make soak     TASKS short-lived programs (10000) under a daemon: no leak, nothing lost'
	@echo 'make services  real containers of containerd, changes of owners, control groups at random and births, SECONDS_EACH (600) s;'
	@echo '              Redis, PostgreSQL and nginx beside twelve aggressors (11 minutes): is the loss as stated, the culprit named?'
	@echo 'make kubernetes  the chart, and the extender under a real scheduler with NODES (1000) and PODS (5000)'
	@echo 'make slurm    the scripts for Slurm in Debian'"'"'s Slurm: a controller and two nodes on this host'
	@echo 'make live     measure on this host (root, at most 30 minutes); reports what it cannot show'
	@echo 'make lab      a real kernel on a modeled machine with shared L3s, PMU and RDT: does all of it work and come back?'
	@echo 'make deb      two Debian packages (target/debian): cachemate, cachemate-daemon; make deb-test installs, exchanges, removes them'
	@echo 'make deb-daemon  the second of them, in half of the time'
	@echo 'make rpm      an rpm with the same files (target/rpm)'
	@echo 'make image    an OCI image of the command for Kubernetes (target/cachemate-image.tar), built without a daemon'
	@echo 'make dist     all of these for users in target/dist: x86-64 and arm64 for glibc 2.28, packages, wheel, sums, SBOM'
	@echo 'make wheel    a wheel for Python 3.11 and later, its stubs and tests with the installed wheel'
	@echo 'make install  the command, its man pages and completions (PREFIX=/usr/local)'

demo:
	@scripts/setup.sh demo
	$(CARGO) build --release --locked -p cachemate-cli
	@demo/run.sh

# Tests append here what this host cannot show; the last lines of `make test` say it.
NOT_SHOWN = $(CURDIR)/target/not-shown
test: lint
	@mkdir -p target && : >'$(NOT_SHOWN)'
	CACHEMATE_NOT_SHOWN='$(NOT_SHOWN)' $(CARGO) run --quiet --locked -p xtask -- test
	@sort '$(NOT_SHOWN)' | uniq -c | sed 's/^ *\([0-9]*\) /not shown here, \1 times: /'
	@echo "$$(wc -l <'$(NOT_SHOWN)') not shown here"

lint:
	@scripts/setup.sh test
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --locked -p cachemate-cli --no-default-features -- -D warnings

build:
	@scripts/setup.sh build
	$(CARGO) build --release --locked -p cachemate-cli

bench:
	@scripts/setup.sh build
	$(CARGO) run --release --locked -p cachemate-bench --bin ratios

KILLS ?= 200
kill:
	@scripts/setup.sh build
	CACHEMATE_KILLS=$(KILLS) $(CARGO) test --locked --workspace --test kill -- --nocapture

faults:
	@scripts/setup.sh build
	CACHEMATE_FAULTS=all $(CARGO) test --locked --workspace --lib everywhere -- --nocapture
	CACHEMATE_FAULTS=all $(CARGO) test --locked --workspace --test inject -- --nocapture

TASKS ?= 10000
soak:
	@scripts/setup.sh build
	CACHEMATE_SOAK=$(TASKS) $(CARGO) test --locked --workspace --test soak -- --nocapture

# containerd, runc and busybox are unpacked below target/ from Debian's packages, and not installed.
SECONDS_EACH ?= 600
services: build
	python3 scripts/containers-test.py $(RELEASE) --tools target/services-tools --download
	CACHEMATE_RACE_SECONDS=$(SECONDS_EACH) $(CARGO) test --locked -p cachemate-linux --test service_races -- --nocapture
	CACHEMATE_TESTED=$(abspath $(RELEASE)) CACHEMATE_BIRTHS_SECONDS=$(SECONDS_EACH) CACHEMATE_BIRTHS_THREADS=10000 \
		$(CARGO) test --locked -p cachemate-cli --test soak births -- --nocapture
	python3 scripts/service-pairs.py $(RELEASE)

# Optional: the tools are built from the Go module proxy into the user's cache folder, once. NOT RUN with the reason without
# go or network.
NODES ?= 1000
PODS ?= 5000
kubernetes: build
	python3 scripts/kubernetes-test.py
	python3 scripts/control-plane-test.py $(RELEASE) --nodes $(NODES) --pods $(PODS)

# Optional: Debian's packages are unpacked below target/. NOT RUN with the reason without apt-get or network.
slurm: build
	scripts/slurm-test.sh $(RELEASE)

live: build
	$(CARGO) run --release --locked -p cachemate-bench -- live
	$(CARGO) run --release --locked -p cachemate-bench -- corun

# Short: gangs, colors and deaths on a modeled machine. LAB_FULL=1: all of it, and the guests without caches.
# The guests' daemons are killed under a policy that only tests have.
CHAOS = target/chaos/cachemate
lab:
	@scripts/setup.sh build
	$(CARGO) build --release --locked -p cachemate-cli --features chaos
	install -D $(RELEASE) $(CHAOS)
	LAB_FULL=$(LAB_FULL) lab/modeled.sh $(CHAOS)
	$(if $(LAB_FULL),lab/run.sh $(CHAOS))
	$(if $(LAB_FULL),$(CARGO) build --release --locked -p cachemate-cli && lab/systemd.sh $(RELEASE))

REPRO ?= --quick
repro: build
	$(RELEASE) repro all $(REPRO) --force -o target/repro
	@echo 'target/repro/index.html'

# PAGES="auto casc" draws those of these pages only.
figures: build
	$(CARGO) run --quiet --locked -p xtask -- results figures $(RELEASE) $(PAGES)
	$(CARGO) run --quiet --locked -p xtask -- map

# Each part runs even if one before it failed; the last line names the failed parts.
nightly:
	@failed=''; for part in 'repro REPRO=--quick' 'kill KILLS=200' faults soak services wheel 'lab LAB_FULL=1' slurm fuzz; do \
		$(MAKE) $$part || failed="$$failed $$part;"; done; \
		[ -z "$$failed" ] || { echo "nightly: failed:$$failed"; exit 1; }

FUZZ_SECONDS ?= 3600
fuzz:
	SECONDS_EACH=$(FUZZ_SECONDS) fuzz/run.sh

PREFIX ?= /usr/local
install: build
	scripts/install.sh '$(PREFIX)'

IMAGE = target/cachemate-image.tar
image: build
	python3 packaging/kubernetes/image.py $(RELEASE) $(IMAGE)

DEB = target/debian
deb: build deb-daemon
	packaging/deb.sh cachemate $(RELEASE) $(DEB)

# A folder of its own for the command: target/daemon.
deb-daemon:
	@scripts/setup.sh build
	$(CARGO) build --profile daemon --locked -p cachemate-cli --no-default-features
	packaging/deb.sh cachemate-daemon target/daemon/cachemate $(DEB)

# The newest package of each of the two names.
NEWEST_DEBS = $$(ls -t $(DEB)/cachemate_*.deb | head -n 1) $$(ls -t $(DEB)/cachemate-daemon_*.deb | head -n 1)
rpm: deb
	for package in $(NEWEST_DEBS); do packaging/rpm.sh $$package target/rpm; done

# Installs both, upgrades and exchanges them under a running daemon, removes and purges them in a system of its own below
# target/.
deb-test: deb
	packaging/test-deb.sh $(NEWEST_DEBS)

# Zig and the environments of its builds lie in target/dist-tools.
dist:
	@scripts/setup.sh build
	scripts/dist.sh target/dist target/dist-tools

# The environment, the wheel and its tests lie in target/wheel.
wheel: build
	@scripts/setup.sh wheel
	scripts/wheel.sh $(RELEASE) target/wheel

clean:
	$(CARGO) clean
