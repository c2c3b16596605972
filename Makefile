# Every target makes its own virtual environment in .venv and installs what it needs, once; `make` lists them.
.DEFAULT_GOAL := help
.PHONY: help demo demo-kafka test test-smoke test-system test-cluster test-cassandra test-kafka test-thorough test-fast test-lowest test-spark test-versions lint bench bench-quick bench-cluster bench-kafka bench-policy nexmark nexmark-quick feldera profile fault fault-timers fault-joins fault-kafka fuzz licenses docs release ui screenshots clean

BIN := .venv/bin

# What each kind of work installs besides the engine (the extras of pyproject.toml).
EXTRAS_run := spark,demo,redis,rocksdb,java
EXTRAS_ui := spark,demo,redis,rocksdb,dagster,java
EXTRAS_screenshots := spark,demo,redis,rocksdb,dagster,java,screenshots
EXTRAS_other := demo,redis,rocksdb,cassandra,report,dagster,postgres,java,docs,dev
EXTRAS_dev := spark,connect,$(EXTRAS_other)
EXTRAS_docs := docs

# The lowest versions are in an environment of their own, with the tool that finds them.
LOWEST := .venv-lowest
UV := uv==0.13.9
# So is Flink, for a benchmark, with what it needs by Maven.
FLINK := .venv-flink
# So are other versions of Spark. 3.5 needs Python 3.11; with a newer one it says so.
SPARK := .venv-spark-
# Feldera's engine, for the same benchmark as Flink, is part of a program in Rust.
FELDERA := benchmarks/feldera
OLDER = PYTHON="$(or $(PYTHON),python3.11 python3)"
READY := .venv/.installed-

# The S3 server of the tests; only where Go is. Without it they have another one, from a wheel.
GATEWAY := github.com/versity/versitygw/cmd/versitygw@v1.8.0
WITH_GATEWAY = VERSITYGW="$$(ls $(CURDIR)/.venv/bin/versitygw 2>/dev/null)" && export VERSITYGW &&

# Spark needs Java 17 or newer: found, or fetched into .jdk, or the command to install it is printed.
WITH_JAVA = JAVA_HOME="$$($(BIN)/python scripts/ensure_java.py)" && export JAVA_HOME &&

# Tests write gigabytes, most of which they sync: in memory, where that is a file system with room, they do not wait.
# They start hundreds of processes, which compile this project's modules but once if they may keep what they compiled.
WITH_TMP = room="$$(df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }')" && \
	if [ "$${room:-0}" -ge 8192 ] && [ -w /dev/shm ] && [ -z "$$TMPDIR" ]; then \
		TMPDIR="$$(mktemp -d /dev/shm/siltstone.XXXXXX)" && export TMPDIR && trap 'rm -rf "$$TMPDIR"' EXIT; fi && \
	export PYTHONDONTWRITEBYTECODE= &&

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(READY)run ## real flights through Spark, a kill -9 in the middle, a proof at the end
	@$(WITH_JAVA) $(BIN)/siltstone demo

demo-kafka: $(READY)dev ## orders through a real Kafka and back, while runs and the broker are killed, and a proof; fetches Kafka with Maven once
	@$(BIN)/python -m tests.kafka_server
	@$(WITH_JAVA) $(WITH_TMP) $(BIN)/python -m tests.fault.kafka_kills --kills 4 --pieces 8 --tell

# Some workers with a Spark session each, for much is waiting; tests/conftest.py puts what takes long first. A worker that
# died ends the run: another would run the same test again, which dies again, for as long as anyone waits.
TEST = $(WITH_JAVA) $(WITH_GATEWAY) $(WITH_TMP) \
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 40 --durations-min 2

SYSTEM := tests/system tests/user
CLUSTER := tests/cluster
# Each of their tests is many processes, which a slow machine starts slowly.
PATIENT := --timeout 1800
CASSANDRA := tests/cassandra
KAFKA := tests/kafka

test: $(READY)dev $(READY)gateway $(READY)classes ## the tests, and a table of the slowest
	@$(TEST) $(SYSTEM:%=--ignore %) --ignore $(CLUSTER) --ignore $(CASSANDRA) --ignore $(KAFKA)

test-system: $(READY)dev $(READY)gateway $(READY)classes ## whole systems as users run them: the wheel, every block of README and guide, the page, runs that are stopped, killed, frozen or lose their machine, a few weeks of flights; half an hour
	@$(TEST) $(PATIENT) $(SYSTEM)

# All tests share one cluster, and each has all its cores.
test-cluster: $(READY)dev $(READY)gateway $(READY)classes ## streams on a Spark cluster whose workers share no disk, some of which die or freeze; needs root
	@$(WITH_JAVA) $(WITH_GATEWAY) $(WITH_TMP) $(BIN)/python -m pytest $(PATIENT) --durations 20 $(CLUSTER)

test-smoke: $(READY)dev $(READY)gateway $(READY)classes $(LOWEST)/.installed ## one test of each kind of whole system: the first stream, kills, a page, a cluster; the first stream and values of every type with the lowest versions
	@$(TEST) $(PATIENT) -m smoke $(SYSTEM)
	@$(WITH_JAVA) $(WITH_GATEWAY) $(WITH_TMP) $(BIN)/python -m pytest $(PATIENT) -m smoke --durations 20 $(CLUSTER)
	@$(LOWEST)/bin/python -m scripts.check_lowest
	@$(WITH_JAVA) $(WITH_TMP) $(LOWEST)/bin/python -m pytest -n 2 --dist loadfile $(PATIENT) -m smoke tests/user tests/spark

# Whole systems that depend on Spark's version: the first stream, flights, sudden ends, Spark Connect.
WITH_SPARK := tests/spark tests/user/test_readme.py $(addprefix tests/system/test_,flights_end_to_end.py resets.py stopping.py connect.py)
VERSION ?= 4.0
test-spark: private BIN := $(SPARK)$(VERSION)/bin
test-spark: $(READY)gateway $(SPARK)$(VERSION)/.installed ## what depends on Spark, under its version VERSION: tests/spark, the README's stream, the demo, runs that are killed; a quarter of an hour
	@$(TEST) $(PATIENT) $(WITH_SPARK)
	@$(WITH_JAVA) $(WITH_TMP) $(BIN)/siltstone demo --warehouse "$$(mktemp -d)/warehouse"
	@$(WITH_JAVA) $(WITH_GATEWAY) $(WITH_TMP) $(BIN)/python tests/fault/harness.py --kills 4 --spark-kills 4 --process-kinds run

VERSIONS ?= 3.5 4.0 4.1 4.2
test-versions: $(READY)dev $(VERSIONS:%=$(SPARK)%/.installed) ## one warehouse continued in turn by this Spark and each of VERSIONS, killed meanwhile; each installs half a gigabyte
	@$(WITH_JAVA) $(WITH_TMP) export SPARK_PYTHONS="$(BIN:%=$(CURDIR)/%)/python $(VERSIONS:%=$(CURDIR)/$(SPARK)%/bin/python)" && \
		$(BIN)/python -m pytest $(PATIENT) tests/versions

test-cassandra: $(READY)dev ## the stores' suites and rounds of kills on a real Cassandra; fetches it with Maven once, and takes a gigabyte of memory
	@$(BIN)/python -m tests.cassandra_server
	@$(WITH_JAVA) $(WITH_TMP) export CASSANDRA_JARS="$$($(BIN)/python -m tests.cassandra_server --where)" && \
		$(BIN)/python -m pytest -k cassandra --durations 10 tests/contract $(CASSANDRA) && \
		$(BIN)/python tests/fault/harness.py --kills 6 --spark-kills 1 --process-kinds run --warehouse-kind cassandra

test-kafka: $(READY)dev ## streams that read and write a real Kafka, which is killed, as they are; fetches it and Spark's connector with Maven once
	@$(BIN)/python -m tests.kafka_server
	@$(WITH_JAVA) $(WITH_TMP) $(BIN)/python -m pytest $(PATIENT) --durations 10 $(KAFKA)

test-thorough: $(READY)dev $(READY)gateway $(READY)classes ## all three with all examples: every bit of every stored object flipped (tests/unit/test_bit_flips.py), 3.3 times as many of hypothesis (tests/property and elsewhere), and the long forms of tests (marked thorough); needs root
	@$(TEST) --hypothesis-profile thorough --timeout 3600 --ignore $(CLUSTER) --ignore $(CASSANDRA) --ignore $(KAFKA)
	@$(WITH_JAVA) $(WITH_GATEWAY) $(WITH_TMP) $(BIN)/python -m pytest --hypothesis-profile thorough --durations 20 $(CLUSTER)

test-fast: $(READY)dev ## the tests that start no server and no JVM, with fewer examples: under a minute
	@$(WITH_TMP) $(BIN)/python -m pytest -p tests.fast -n 3 --dist worksteal tests/unit tests/property tests/contract

test-lowest: $(LOWEST)/.installed ## the fast tests and the README's stream, with the lowest versions that pyproject.toml allows
	@$(LOWEST)/bin/python -m scripts.check_lowest
	@$(WITH_TMP) $(LOWEST)/bin/python -m pytest -p tests.fast -n 3 --dist worksteal tests/unit tests/property tests/contract
	@JAVA_HOME="$$($(LOWEST)/bin/python scripts/ensure_java.py)" && export JAVA_HOME && \
		$(WITH_TMP) $(LOWEST)/bin/python -m pytest tests/user/test_readme.py

lint: $(READY)dev ## ruff, pyright and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=. $(BIN)/python -m scripts.check_public_types
	$(BIN)/lint-imports

bench: $(READY)dev $(READY)gateway ## the engine beside its peers, in one run
	@$(WITH_JAVA) $(WITH_GATEWAY) $(BIN)/python -m benchmarks

bench-quick: $(READY)dev $(READY)gateway ## three parts of it at small sizes, in three minutes: steps, Python operators, waits for checkpoints
	@$(WITH_JAVA) $(WITH_GATEWAY) $(BIN)/python -m benchmarks step pending python --quick

bench-cluster: $(READY)dev $(READY)gateway ## a Spark cluster beside one machine with as many cores, and how fast it goes on when a worker is killed; needs root
	@$(WITH_JAVA) $(WITH_GATEWAY) $(BIN)/python -m benchmarks cluster

bench-kafka: $(READY)dev ## from Kafka to Kafka, exactly once, beside Spark's own source, state and sink; fetches Kafka with Maven once
	@$(BIN)/python -m tests.kafka_server
	@$(WITH_JAVA) $(BIN)/python -m benchmarks kafka

profile: $(READY)dev ## where a step's time goes, phase by phase, as flame graphs in profile.png
	@$(WITH_JAVA) $(BIN)/python -m benchmarks profile

nexmark: $(READY)dev $(FLINK)/.installed ## NEXMark's queries beside Spark's own, Flink's and, where Rust is, Feldera's, three rounds of half a million events a step; hours
	@if command -v cargo >/dev/null; then $(MAKE) --no-print-directory feldera; fi
	@$(WITH_JAVA) $(BIN)/python -m benchmarks nexmark

nexmark-quick: $(READY)dev ## the same without Flink in one round of fewer and smaller steps: half an hour
	@$(WITH_JAVA) $(BIN)/python -m benchmarks nexmark --quick --rounds 1 --systems siltstone seldom spark

feldera: ## Feldera's engine for `make nexmark`, built with Rust's cargo; twenty minutes the first time
	@cargo build --release --manifest-path $(FELDERA)/Cargo.toml --target-dir $(FELDERA)/target

bench-policy: $(READY)run ## the checkpoint policies against the optimum in hindsight
	@$(BIN)/python -m benchmarks.policy

fault: $(READY)dev $(READY)gateway ## 300 processes of every kind killed, frozen and starved on every kind of warehouse; nothing may be lost or doubled
	@$(WITH_JAVA) $(WITH_GATEWAY) $(BIN)/python tests/fault/harness.py --kills 300 --process-kinds all --warehouse-kind all --catalog-kind all

fault-timers: $(READY)dev $(READY)gateway ## 300 processes of streams with timers killed, and 100 on a cluster (as root); clocks jump; every session, hour and first row once
	@$(WITH_JAVA) $(WITH_TMP) $(BIN)/python -m tests.fault.timed_kills --kills 300
	@$(WITH_JAVA) $(WITH_GATEWAY) $(WITH_TMP) $(BIN)/python -m tests.fault.timed_kills --kills 100 --cluster

fault-joins: $(READY)dev ## 100 processes of streams that join two sources killed; each pair, and each row without a partner, once
	@$(WITH_JAVA) $(WITH_TMP) $(BIN)/python -m tests.fault.join_kills --kills 100

fault-kafka: $(READY)dev ## 60 processes of streams from Kafka to Kafka killed, and the broker: killed, away, frozen; every order and total once
	@$(BIN)/python -m tests.kafka_server
	@$(WITH_JAVA) $(WITH_TMP) $(BIN)/python -m tests.fault.kafka_kills --kills 60

FUZZ_MINUTES ?= 60
fuzz: $(READY)dev ## every decoder of stored bytes against crafted ones, FUZZ_MINUTES long; what is found stays in the corpus
	@$(WITH_TMP) $(BIN)/python -m tests.fuzz.test_decoders --minutes $(FUZZ_MINUTES)

release: $(READY)dev ## wheel and source distribution of this commit in dist/, built twice and alike; CONTRIBUTING.md has the steps
	@$(BIN)/python -m scripts.build_release

licenses: $(READY)dev ## docs/third-party-licenses.md, from what is installed
	@$(BIN)/python -m scripts.licenses --write

docs: $(READY)docs ## the guide and the reference as a site in site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

ui: $(READY)ui ## the Dagster web server on this code location
	@$(WITH_JAVA) $(BIN)/siltstone ui

screenshots: $(READY)screenshots ## docs/pictures from a running page; needs Debian's chromium
	@$(WITH_JAVA) $(BIN)/python -m scripts.screenshots

clean: ## remove the environment, the fetched JDK and everything tools left behind; warehouses stay
	rm -rf .venv $(LOWEST) $(SPARK)* $(FELDERA)/target .jdk build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each kind of work; a change to what is declared or pinned installs again. Bytecode is compiled on all
# cores, not by pip on one, and not left to imports, which do not keep it where PYTHONDONTWRITEBYTECODE is set.
# Packages hold some files that are no Python 3, as templates; those are passed over.
$(READY)%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into .venv (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@$(BIN)/python -m compileall -q -j 0 "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null || true
	@touch $@

$(LOWEST)/.installed: pyproject.toml
	@echo "Installing into $(LOWEST) (some minutes the first time)"
	@$(OLDER) scripts/make_venv.sh $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check '$(UV)'
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[$(EXTRAS_dev)]'
	@touch $@

$(FLINK)/.installed: benchmarks/flink.py | $(READY)dev
	@echo "Installing into $(FLINK) (most of a gigabyte)"
	@$(OLDER) scripts/make_venv.sh $(FLINK)
	@$(BIN)/python -m benchmarks.flink
	@touch $@

# Another version of Spark, with the same packages beside it.
$(SPARK)%/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(@D) (some minutes the first time)"
	@$(OLDER) scripts/make_venv.sh $(@D)
	@grep -vE '^(pyspark|py4j)==' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(@D)/constraints.txt \
		-e '.[$(EXTRAS_other)]' 'pyspark[connect]==$*.*'
	@touch $@

$(READY)gateway: | $(BIN)/python
	@if command -v go >/dev/null; then echo "Building versitygw into .venv (a minute the first time)"; \
		GOBIN="$(CURDIR)/$(BIN)" go install $(GATEWAY); fi
	@touch $@

$(READY)classes: $(READY)dev
	@echo "Archiving Spark's classes, so that the JVMs of tests start fast (half a minute the first time)"
	@$(WITH_JAVA) $(BIN)/python -m tests.jvm >/dev/null
	@touch $@

$(BIN)/python:
	@PYTHON="$(PYTHON)" scripts/make_venv.sh .venv
