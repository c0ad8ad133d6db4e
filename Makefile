# Two commands do everything on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
APT_INSTALL := tests/support/apt_install.sh
UV := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv
# tests of real processes mostly wait: two at a time keep a core busy
WORKERS ?= $(shell $(PYTHON) -c "import os; print(2 * os.cpu_count())")

FROM ?= $(shell git describe --tags --abbrev=0 2> /dev/null)

# the tests start thousands of processes, and each would compile what it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-slow test-thorough test-method test-mixed test-brokers test-stores coverage lint check wheel dist audit docs own-graphs backbones boards power-cuts mosquitto postgresql prometheus chromium compiler cross-compiler python-apt nats rabbitmq azurite arm arm-torch kernels methods errors verdicts constraints clean

install: $(VENV)/.installed

# torch and torchvision must come from the same registry build, so one step installs everything
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@echo "installing fedvit and what it needs into $(VENV) (about 6 GB, once; half a minute to a few minutes)"
	@$(UV) pip install --quiet -c constraints.txt -e ".[server,dev,docs]"
	@touch $@
	@echo "next: source $(BIN)/activate"

demo: install
	@$(BIN)/fleet demo

# the tests that every change needs (goal: 8 minutes on two cores); test-slow runs the others (tests/support/slow.py)
test: install mosquitto postgresql prometheus chromium compiler
	@env -u FEDVIT_TESTS_UNTIL $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"

test-slow: install mosquitto postgresql prometheus chromium compiler python-apt
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m slow

# the same with as many kills, faults and seeds as a release needs
test-thorough:
	@FEDVIT_THOROUGH=1 $(MAKE) --no-print-directory test-slow

# the contracts of one method, also of an installed package: make test-method METHOD=NAME
test-method: install
	@test -n "$(METHOD)" || { echo "name the method: make test-method METHOD=NAME" >&2; exit 2; }
	@$(BIN)/python -m pytest -q -n $(WORKERS) tests/contracts/test_methods.py -k "$(METHOD)"

# the contracts of transports and blobs, and whole runs, over brokers of other makers
test-brokers: install mosquitto nats rabbitmq
	@FEDVIT_TEST_BROKERS="nats nats-cluster rabbitmq rabbitmq-cluster" $(BIN)/python -m pytest -q -n 2 \
	  tests/contracts/test_transport.py tests/contracts/test_blob_exchange.py tests/contracts/test_broker_users.py \
	  tests/e2e/test_other_brokers.py

# the contracts of object stores over a server that speaks Azure
test-stores: install azurite
	@FEDVIT_TEST_STORES="s3 azure" $(BIN)/python -m pytest -q -n 2 tests/contracts/test_object_store.py \
	  tests/contracts/test_mirror.py

# devices and coordinators of an older version and of this one together: make test-mixed FROM=v0.1.0; by default the last tag
test-mixed: install mosquitto
	@tests/mixed/older.sh "$(FROM)" $(CURDIR)/build/mixed $(CURDIR)/$(BIN)/uv
	@FEDVIT_OTHER=$(CURDIR)/build/mixed/$(FROM)/env/bin $(BIN)/python -m pytest -q -n 2 tests/mixed/checks.py

# which lines the tests reach, also in programs that they start: a table, and pages in build/coverage/html
coverage: install mosquitto postgresql prometheus chromium compiler python-apt
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/python -m pytest -q -n $(WORKERS) --cov --cov-report=term --cov-report=html $(TESTS)

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -c "from coordinator.compute.planning.method_entry import read_stored_entries; \
	  read_stored_entries() or exit('files of methods or models were changed since the last: make methods')"

# what CI runs
check: lint test test-slow wheel docs

# the device's wheel, installed alone in an empty environment, outside of this folder
wheel: install
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(BIN)/python -m build --quiet --wheel --installer uv --outdir build/wheel .
	@$(BIN)/python -m venv --without-pip build/wheel/env
	@VIRTUAL_ENV=$(CURDIR)/build/wheel/env $(BIN)/uv pip install --quiet -c constraints.txt build/wheel/fedvit-*.whl
	@cd build/wheel && env/bin/python -I -c "import edge_client.agent, fedvit.transport.mqtt, profiles.probes.host"
	@cd build/wheel && env/bin/edge-client --help > help.txt
	@cd build/wheel && ! ls env/lib/python*/site-packages | grep -E '^(torch|timm|onnx|sklearn|sqlalchemy)$$'
	@du -sm build/wheel/env | awk '{print "the device installs as " $$1 " MB, without torch"}'
	@rm -rf build/wheel

# the committed state in dist/: sdist and wheels, built twice in two folders, which must be equal bit by bit; and Debian
# packages, by default for arm64 and amd64 with Python 3.11 and 3.13 (DEBS=arm64:3.11)
dist: install compiler cross-compiler
	@rm -rf dist build/dist
	@for build in one two; do tests/support/build_dist.sh build/dist/$$build $(CURDIR)/$(BIN)/python; done
	@diff -r build/dist/one/files build/dist/two/files
	@mv build/dist/one/files dist && rm -rf build/dist
	@deploy/debian/build.sh dist/fedvit-[0-9]*.whl dist $(CURDIR)/$(BIN)/python $(DEBS)
	@cd dist && sha256sum *

# known vulnerabilities of the pinned packages; needs the network
audit: install
	@$(UV) pip install --quiet pip-audit
	@mkdir -p build && grep -v '^pip==' constraints.txt > build/audit.txt
	@$(BIN)/pip-audit --no-deps --disable-pip -r build/audit.txt

# the pages as a site in build/site, without requests to other hosts; a link that leads nowhere is an error
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//' build/site --include='*.html'
	@echo "the site is in build/site; open build/site/index.html"

# the optional operators for this machine's devices; CXX=aarch64-linux-gnu-g++ with `pip wheel` makes those of a board
kernels: install
	@$(UV) pip install --quiet --reinstall-package fedvit-kernels -c constraints.txt ./kernels

# the tests run against a real mosquitto
mosquitto:
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; command -v mosquitto > /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing mosquitto"; $(APT_INSTALL) mosquitto openssl; \
	  else echo "the tests need mosquitto: sudo apt-get install mosquitto (or brew install mosquitto)" >&2; exit 1; fi; }

# and keep the record of runs in a real PostgreSQL, too
postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || command -v initdb > /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing postgresql"; $(APT_INSTALL) postgresql; \
	  else echo "the tests need postgresql: sudo apt-get install postgresql" >&2; exit 1; fi; }

# a real prometheus scrapes them
prometheus:
	@command -v prometheus > /dev/null && command -v promtool > /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing prometheus"; $(APT_INSTALL) --no-install-recommends prometheus; \
	  else echo "the tests need prometheus: sudo apt-get install prometheus (or brew install prometheus)" >&2; exit 1; fi; }

# the optional kernels are compiled
compiler:
	@command -v g++ > /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing g++"; $(APT_INSTALL) --no-install-recommends g++; \
	  else echo "the tests need g++: sudo apt-get install g++ (or brew install gcc)" >&2; exit 1; fi; }

# with it Ansible installs packages
python-apt:
	@/usr/bin/python3 -c "import apt" 2> /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing python3-apt"; $(APT_INSTALL) --no-install-recommends python3-apt; \
	  else echo "the tests need python3-apt: sudo apt-get install python3-apt" >&2; exit 1; fi; }

# and for a board's processor
cross-compiler:
	@command -v aarch64-linux-gnu-g++ > /dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then echo "installing a compiler for aarch64"; \
	    $(APT_INSTALL) --no-install-recommends g++-aarch64-linux-gnu; \
	  else echo "a compiler for aarch64 is needed: sudo apt-get install g++-aarch64-linux-gnu" >&2; exit 1; fi; }

# and look at the reports in a browser
chromium:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing chromium"; $(APT_INSTALL) chromium; \
	  else echo "the tests need chromium: sudo apt-get install chromium" >&2; exit 1; fi; }

# for `make test-brokers`
nats:
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; command -v nats-server > /dev/null || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing nats-server"; $(APT_INSTALL) nats-server; \
	  else echo "the tests need nats-server: sudo apt-get install nats-server" >&2; exit 1; fi; }

rabbitmq:
	@test -x /usr/lib/rabbitmq/bin/rabbitmq-server || { \
	  if command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing rabbitmq-server"; RUNLEVEL=1 $(APT_INSTALL) --no-install-recommends rabbitmq-server; \
	  else echo "the tests need rabbitmq-server: sudo apt-get install rabbitmq-server" >&2; exit 1; fi; }

# for `make test-stores`
azurite:
	@test -x build/azurite/node_modules/.bin/azurite-blob || { \
	  command -v npm > /dev/null || { echo "the tests need npm: sudo apt-get install npm" >&2; exit 1; }; \
	  echo "installing azurite into build/azurite"; mkdir -p build/azurite; \
	  npm install --prefix build/azurite --no-audit --no-fund --ignore-scripts --silent azurite@3.33.0; }

# the device on emulated processors of a Raspberry Pi 4 and 5 (docs/devices.md); Debian alone has all that it needs
arm: install mosquitto build/arm/.made build/arm/kernels/.made
	@$(BIN)/python -m pytest -q -rP -n 2 tests/arm/checks.py

# instructions of training steps there, and on an x86-64 processor with AVX2, beside torch's, a table; CASES="fedavg-vitt"
# for some of the cases
arm-torch: install build/arm/.made build/arm/kernels/.made build/arm/torch/.made $(if $(filter x86_64,$(shell uname -m)),compiler)
	@[ "$$(uname -m)" != x86_64 ] || $(BIN)/uv pip install --quiet --no-deps --reinstall --target build/arm/kernels-x86 ./kernels
	@$(BIN)/python -m tests.arm.compare_steps $(CASES)

# the newest torch for aarch64 that has no CUDA and runs on a Cortex-A72: the wheel of 2.10 uses newer instructions
build/arm/torch/.made: build/arm/.made
	@rm -rf build/arm/torch
	@$(BIN)/uv pip install --quiet --python build/arm/cortex-a72/bin/python --only-binary :all: --target build/arm/torch \
	  torch==2.9.1 torchvision==0.24.1 $$(grep -E '^(timm|numpy)==' constraints.txt)
	@touch $@

build/arm/.made: tests/arm/root.sh tests/arm/instructions.c pyproject.toml constraints.txt $(VENV)/.installed
	@command -v qemu-aarch64 > /dev/null && command -v cc > /dev/null && command -v llvm-mca > /dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then echo "installing an emulator, a C compiler and a model of processors"; \
	    $(APT_INSTALL) --no-install-recommends qemu-user gcc libc6-dev llvm; \
	  else echo "make arm needs: sudo apt-get install qemu-user gcc libc6-dev llvm" >&2; exit 1; fi; }
	@echo "unpacking Python and the device's packages for aarch64 into build/arm (about 250 MB, once)"
	@tests/arm/root.sh build/arm $(BIN)/uv
	@touch $@

# the wheel of the optional kernels for these processors, unpacked
build/arm/kernels/.made: build/arm/.made kernels/compile.py kernels/setup.py kernels/fedvit_kernels/__init__.py $(wildcard kernels/src/*) | cross-compiler
	@rm -rf build/arm/kernels kernels/build && mkdir -p build/arm/kernels
	@CXX=aarch64-linux-gnu-g++ $(BIN)/python -m build --quiet --installer uv --wheel --outdir build/arm/kernels kernels
	@$(BIN)/python -m zipfile -e build/arm/kernels/fedvit_kernels-*-manylinux_*_aarch64.whl build/arm/kernels
	@touch $@

# docs/backbones.md: each listed backbone is exported and verified; 15 GB of memory
backbones: install
	@$(BIN)/python -m pytest -q tests/backbones/check_backbones.py

# power cuts and faults of a device's disk, without an emulator (docs/boards.md); root
power-cuts: install mosquitto
	@$(BIN)/python -m pytest -q -rP tests/e2e/check_*.py

# the device on virtual boards, from first boot to power cuts (docs/boards.md); root. One check: CHECK=name; with
# AGAIN=1 the next call begins with the board as it is after its first round; ARCH=arm64 for Raspberry Pi's processors,
# whose image needs Linux 6.7 where this machine's is another one
ARCH ?= amd64
BOARDS := build/boards/$(ARCH)
BOARD_TOOLS := mmdebstrap e2fsprogs openssh-client $(if $(filter arm64,$(ARCH)),qemu-system-arm qemu-user-static,qemu-system-x86)
boards: install mosquitto $(BOARDS)/image/.made
	@echo "building the device's package for $(ARCH), in two versions"
	@tests/boards/package.sh $(BOARDS)/package $(CURDIR)/$(BIN)/python $(ARCH) 0.1.1
	@FEDVIT_BOARD_ARCH=$(ARCH) FEDVIT_BOARD_AGAIN=$(AGAIN) $(BIN)/python -m pytest -q -rP $(if $(AGAIN),-n 0,-n 2 --dist loadfile) tests/boards/check_*.py $(if $(CHECK),-k "$(CHECK)")

$(BOARDS)/image/.made: tests/boards/image.sh
	@dpkg --status $(BOARD_TOOLS) > /dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ]; then echo "installing an emulator and the tools for an image"; \
	    $(APT_INSTALL) --no-install-recommends $(BOARD_TOOLS); \
	  else echo "make boards needs root, and: $(BOARD_TOOLS)" >&2; exit 1; fi; }
	@echo "installing Debian for $(ARCH) into $(BOARDS)/image (once; a minute, or a quarter of an hour where its scripts are emulated)"
	@tests/boards/image.sh $(BOARDS)/image $(ARCH)
	@touch $@

# after a change of methods or models: what `coordinator methods` shows of them, and what `edge-client certify` runs
methods: install
	@$(BIN)/python -c "from coordinator.compute.planning.catalogue import store_entries; store_entries()"
	@$(BIN)/python -c "from coordinator.compute.planning.trials import store_trials; store_trials()"

# after a change of methods, models or their export: the digests of graphs that devices know without a publisher;
# METHOD="NAME NAME" adds those of new methods
own-graphs: install
	@$(BIN)/python -c "from coordinator.compute.planning.own_graphs import store_digests; store_digests('$(METHOD)'.split())"

# docs/troubleshooting.md from the explanations of error codes
errors: install
	@$(BIN)/python -m fedvit.explanations docs/troubleshooting.md

# after a change of docs/results: the tables of fleet/experiments/README.md, and measured.md
verdicts: install
	@$(BIN)/python -m fleet.experiments.verdicts docs/results fleet/experiments

# after an upgrade that passed `make check`
constraints: install
	@{ echo "# The versions that the tests ran with: names and versions only. Renew with: make constraints"; \
	   $(UV) pip freeze --quiet --exclude-editable | grep '=='; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
