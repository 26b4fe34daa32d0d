# Two commands on a fresh Debian 12 machine: `make run` and `make test`.
# The real build is CMake with presets (CMakePresets.json); this file only strings its steps together.
PRESET ?= $(shell command -v nvcc >/dev/null 2>&1 && echo cuda || echo cpu)
JOBS ?= $(shell nproc)
BUILD := build/$(PRESET)

.PHONY: run test build command setup test-release test-asan test-fuzz bench format tidy clean

run: command
	scripts/demo.sh $(BUILD)/cli/mla

test: setup test-release test-asan test-fuzz

setup:
	scripts/install-packages.sh

build: setup
	cmake --preset $(PRESET)
	cmake --build $(BUILD) --parallel $(JOBS)

# The mla command without the tests.
command: setup
	cmake --preset $(PRESET)
	cmake --build $(BUILD) --parallel $(JOBS) --target mla_cli

test-release: build
	ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)

# ASan + UBSan over the same tests.
test-asan: setup
	cmake --preset asan
	cmake --build build/asan --parallel $(JOBS)
	OMP_NUM_THREADS=2 ctest --test-dir build/asan --output-on-failure --parallel $(JOBS)

# libFuzzer over the file readers, for a bounded time from the corpus in the repository.
test-fuzz: setup
	cmake --preset fuzz
	cmake --build build/fuzz --parallel $(JOBS) --target fuzz
	ctest --test-dir build/fuzz --output-on-failure -L fuzz

bench: command
	$(BUILD)/cli/mla bench --suite cpu

format:
	git ls-files '*.cpp' '*.hpp' '*.h' '*.c' '*.cu' '*.cuh' | xargs clang-format -i

tidy: build
	git ls-files 'src/core/*.cpp' 'src/capi/*.cpp' 'src/io/*.cpp' 'src/model/*.cpp' | xargs clang-tidy -p $(BUILD) --quiet

clean:
	rm -rf build
