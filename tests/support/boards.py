"""File trees of named boards, as far as the probes read them: layouts of their kernels, figures of a plausible day."""

from pathlib import Path

PI_5_ADC = """\
 3V7_WL_SW_A current(0)=0.00390372A
   3V3_SYS_A current(1)=0.07026696A
   1V8_SYS_A current(2)=0.16004520A
  DDR_VDD2_A current(3)=0.02439750A
  VDD_CORE_A current(7)=0.90600000A
 3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
   1V8_SYS_V volt(10)=1.80000000V
  DDR_VDD2_V volt(11)=1.10000000V
  VDD_CORE_V volt(15)=0.72000000V
     EXT5V_V volt(24)=5.13000000V
      BATT_V volt(25)=0.00000000V
"""
"""Five of the rails of a Pi 5; EXT5V and BATT have volts but no amperes."""


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_command(root: Path, name: str, script: str) -> None:
    """A command of the board, as a shell script."""
    path = root / "usr/bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def vcgencmd(root: Path, throttled: str, adc: str | None) -> None:
    """`adc` None: an older board, whose firmware does not know pmic_read_adc."""
    answer = f"cat <<'END'\n{adc}\nEND" if adc else "echo 'error=1 error_msg=\"Command not registered\"'; exit 1"
    write_command(
        root,
        "vcgencmd",
        f'case "$1" in\nget_throttled) echo "throttled={throttled}";;\npmic_read_adc) {answer}\n;;\nesac',
    )


def cpufreq(cores: int, now_khz: int, allowed_khz: int, max_khz: int, governor: str = "ondemand") -> dict[str, str]:
    files = {
        "scaling_cur_freq": now_khz, "scaling_max_freq": allowed_khz, "cpuinfo_max_freq": max_khz,
        "scaling_governor": governor,
    }  # fmt: skip
    base = "sys/devices/system/cpu"
    return {f"{base}/cpu{core}/cpufreq/{name}": f"{text}\n" for core in range(cores) for name, text in files.items()}


def _pi(root: Path, model: str, temperature_mc: int, cooler: str, level: int, files: dict[str, str]) -> Path:
    return write_tree(
        root,
        {
            "proc/device-tree/model": f"Raspberry Pi {model}\0",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": f"{temperature_mc}\n",
            "sys/class/thermal/cooling_device0/type": f"{cooler}\n",
            "sys/class/thermal/cooling_device0/cur_state": f"{level}\n",
            **files,
        },
    )


def pi_4(root: Path, *, throttled: str = "0x0") -> Path:
    vcgencmd(root, throttled, None)
    files = {
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n',
        "proc/meminfo": "MemTotal:        3884396 kB\nMemAvailable:    3412200 kB\nSwapTotal:        102396 kB\n",
        "proc/sys/kernel/osrelease": "6.6.31+rpt-rpi-v8\n",
        "proc/cpuinfo": 4 * "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd08\n\n",
    }
    speed = cpufreq(4, 1_800_000, 1_800_000, 1_800_000)
    return _pi(root, "4 Model B Rev 1.4", 55_017, "cpufreq-cpu0", 0, {**files, **speed})


def pi_5(root: Path, *, throttled: str = "0x0") -> Path:
    vcgencmd(root, throttled, PI_5_ADC)
    return _pi(root, "5 Model B Rev 1.0", 48_850, "pwm-fan", 2, cpufreq(4, 1_500_000, 2_400_000, 2_400_000))


def _zones(zones: dict[str, str]) -> dict[str, str]:
    files = {}
    for number, (name, temperature) in enumerate(zones.items()):
        files[f"sys/class/thermal/thermal_zone{number}/type"] = name + "\n"
        files[f"sys/class/thermal/thermal_zone{number}/temp"] = temperature
    return files


def _hwmon_rails(chip: str, number: int, rails: dict[str, tuple[int, int]]) -> dict[str, str]:
    base = f"sys/bus/i2c/drivers/ina3221/{chip}/hwmon/hwmon{number}"
    files = {f"{base}/name": "ina3221\n", f"{base}/in7_label": "sum of shunt voltages\n", f"{base}/in7_input": "80\n"}
    for place, (label, (volt_m, ampere_m)) in enumerate(rails.items(), 1):
        files |= {
            f"{base}/in{place}_label": label + "\n",
            f"{base}/in{place}_input": f"{volt_m}\n",
            f"{base}/curr{place}_input": f"{ampere_m}\n",
        }
    return files


def orin_nano(root: Path) -> Path:
    """JetPack 6: hwmon, with a rail of the whole board."""
    return write_tree(
        root,
        {
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
            **_zones({"cpu-thermal": "51125\n", "gpu-thermal": "52500\n", "cv0-thermal": "", "tj-thermal": "52500\n"}),
            "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
            "sys/class/thermal/cooling_device0/cur_state": "1\n",
            "sys/class/thermal/cooling_device1/type": "thermal-cpufreq-0\n",
            "sys/class/thermal/cooling_device1/cur_state": "0\n",
            **_hwmon_rails("1-0040", 1, {"VDD_IN": (5064, 992), "VDD_CPU_GPU_CV": (5056, 160), "VDD_SOC": (5056, 296)}),
            **cpufreq(6, 1_113_600, 1_190_400, 1_510_400, "schedutil"),
        },
    )


def agx_orin(root: Path) -> Path:
    """Two monitors, no rail of the whole board, and one channel that is not connected."""
    return write_tree(
        root,
        {
            "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
            **_hwmon_rails("1-0040", 3, {"VDD_GPU_SOC": (20_000, 150), "VDD_CPU_CV": (20_000, 40)}),
            **_hwmon_rails("1-0041", 4, {"VIN_SYS_5V0": (5000, 700), "NC": (20_000, 0)}),
        },
    )


def jetson_nano(root: Path) -> Path:
    """JetPack 4: iio, milliwatts."""
    base = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    rails = {"POM_5V_IN": 2314, "POM_5V_GPU": 40, "POM_5V_CPU": 401}
    files = {}
    for number, (name, milliwatts) in enumerate(rails.items()):
        files[f"{base}/rail_name_{number}"] = name + "\n"
        files[f"{base}/in_power{number}_input"] = f"{milliwatts}\n"
    zones = {"AO-therm": "41500\n", "CPU-therm": "33000\n", "PMIC-Die": "100000\n", "thermal-fan-est": "33500\n"}
    return write_tree(root, {"proc/device-tree/model": "NVIDIA Jetson Nano Developer Kit\0", **files, **_zones(zones)})


def rapl(root: Path, *packages_uj: int, psys_uj: int | None = None, range_uj: int = 262_143_328_850) -> Path:
    """The counters of a PC with so many processors; each has a domain of its cores, which is part of it."""
    files = {}
    counters = [(f"package-{number}", value) for number, value in enumerate(packages_uj)]
    counters += [("psys", psys_uj)] if psys_uj is not None else []
    for number, (name, value) in enumerate(counters):
        for folder, domain, counter in (
            (f"intel-rapl:{number}", name, value),
            (f"intel-rapl:{number}:0", "core", value // 2),
        ):
            base = f"sys/class/powercap/{folder}"
            files |= {
                f"{base}/name": domain + "\n",
                f"{base}/energy_uj": f"{counter}\n",
                f"{base}/max_energy_range_uj": f"{range_uj}\n",
            }
    return write_tree(root, files)


def x86(root: Path) -> Path:
    """An Intel laptop."""
    counts = {
        f"sys/devices/system/cpu/cpu{core}/thermal_throttle/{kind}_throttle_count": "0\n"
        for core in range(2)
        for kind in ("core", "package")
    }
    return write_tree(
        rapl(root, 1_000_000),
        {
            "sys/class/dmi/id/sys_vendor": "LENOVO\n",
            "sys/class/dmi/id/product_name": "20XW0055GE\n",
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
            "proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: 11th Gen Intel(R) Core(TM) i7\n",
            **_zones(
                {"INT3400 Thermal": "20000\n", "acpitz": "27800\n", "x86_pkg_temp": "61000\n", "iwlwifi_1": "70000"}
            ),
            "sys/class/thermal/cooling_device0/type": "Processor\n",
            "sys/class/thermal/cooling_device0/cur_state": "0\n",
            "sys/class/thermal/cooling_device1/type": "intel_powerclamp\n",
            "sys/class/thermal/cooling_device1/cur_state": "-1\n",
            "sys/class/thermal/cooling_device2/type": "TCC Offset\n",
            "sys/class/thermal/cooling_device2/cur_state": "3\n",
            **counts,
        },
    )
