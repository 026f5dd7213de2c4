//! Several hosts on one machine: network namespaces, connected by links whose rate and delay `tc` sets.
//!
//! Each host is a namespace with its own host name and two links to a switch, which is a namespace too: `data`, with the given
//! rate and delay, for the ranks; and `control`, for the launcher. So a test can cut a host's data link (`ip link set data down`,
//! on that host) and still see what happens to the ranks.
//!
//! The delay comes from `tc`'s netem. If the kernel lacks it, the data links end in a small program in the switch's namespace
//! (`delay_line.py`) that forwards every frame after the delay; frames are then up to 64 KB long, so that the program keeps up.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The hosts to create.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// The number of hosts.
    pub hosts: usize,
    /// The number of ranks per host.
    pub ranks_per_host: usize,
    /// The rate of each host's data link, in `tc`'s syntax: `1gbit`.
    pub rate: String,
    /// The one-way delay of each host's data link, in `tc`'s syntax: `1ms`.
    pub delay: String,
}

/// Why the hosts could not be created.
#[derive(Debug)]
pub struct HostsError(String);

impl fmt::Display for HostsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the hosts could not be created: {}", self.0)
    }
}

impl std::error::Error for HostsError {}

/// Running hosts. They are removed when this is dropped or this process ends, however it ends.
pub struct Network {
    hosts: Hosts,
    names: Vec<String>,
    agent: PathBuf,
    /// The process that created everything. It cleans up when its standard input is closed, which happens at the latest when this
    /// process ends, even if it is killed.
    guard: Child,
}

impl Hosts {
    /// Creates the hosts. Needs root and Debian's `iproute2`.
    pub fn start(&self) -> Result<Network, HostsError> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        if !(1..=200).contains(&self.hosts) || self.ranks_per_host == 0 {
            return Err(HostsError("there must be 1 to 200 hosts with at least one rank each".to_string()));
        }
        let delay_s = seconds(&self.delay).ok_or_else(|| {
            HostsError(format!("'{}' is not a delay; write, for example, 0ms, 500us, 1ms or 0.1s", self.delay))
        })?;
        let prefix = format!("sw{}x{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let names: Vec<String> = (0..self.hosts).map(|host| format!("{prefix}h{host}")).collect();
        let switch = format!("{prefix}s");
        let agent = std::env::temp_dir().join(format!("{prefix}-agent"));

        // One process creates the hosts and removes them, so that none can be created after the cleanup.
        let mut guard = Command::new("setsid")
            .args(["bash", "-c", GUARD, "guard", CREATE])
            .arg(&agent)
            .args([&switch, &self.rate, &self.delay, &delay_s.to_string(), DELAY_LINE])
            .args(&names)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| HostsError(format!("setsid: {error}")))?;
        let output = guard.stdout.take().map(BufReader::new);
        let network = Network { hosts: self.clone(), names, agent, guard };
        network.write_agent().map_err(|error| HostsError(format!("{}: {error}", network.agent.display())))?;
        let mut problem = String::new();
        for line in output.into_iter().flat_map(BufReader::lines) {
            match line {
                Ok(line) if line == "created" => return Ok(network),
                Ok(line) => problem += &(line + "\n"),
                Err(error) => problem += &error.to_string(),
            }
        }
        let needs = "this needs root and Debian's iproute2; rate and delay use tc's syntax: 1gbit, 1ms";
        Err(HostsError(format!("{problem}({needs})")))
    }
}

/// Parses a delay in `tc`'s syntax.
fn seconds(delay: &str) -> Option<f64> {
    let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.)];
    let (number, unit) = units.iter().find_map(|&(name, unit)| Some((delay.strip_suffix(name)?, unit)))?;
    let number: f64 = number.trim().parse().ok()?;
    (number.is_finite() && number >= 0.).then_some(number * unit)
}

const DELAY_LINE: &str = include_str!("delay_line.py");

const CREATE: &str = r#"
switch=$1 rate=$2 delay=$3 delay_s=$4 delay_line=$5
shift 5
ip netns add "$switch"
# How the data links are delayed: not at all, by netem, or by the delay line.
how=none
if [ "$delay_s" != 0 ]; then
    ip -n "$switch" link set lo up
    if tc -n "$switch" qdisc add dev lo root netem delay "$delay" 2>/dev/null; then how=netem; else how=line; fi
fi
if [ "$how" = line ]; then
    taps=$(i=1; for host in "$@"; do echo "tap$i"; i=$((i + 1)); done)
    setsid ip netns exec "$switch" python3 -c "$delay_line" "$delay_s" $taps </dev/null >/dev/null 2>&1 &
    tries=0
    until ip -n "$switch" link show "tap$#" >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ "$tries" -lt 200 ] || { echo "the delay line did not start: it needs python3 and /dev/net/tun" >&2; exit 1; }
        sleep 0.05
    done
fi
for bridge in data control; do
    ip -n "$switch" link add "$bridge" type bridge
    ip -n "$switch" link set "$bridge" up
done
hosts=$(i=1; for host in "$@"; do echo "10.90.0.$i $host"; i=$((i + 1)); done)
i=1
for host in "$@"; do
    ip netns add "$host"
    mkdir -p "/etc/netns/$host"
    printf '127.0.0.1 localhost\n%s\n' "$hosts" >"/etc/netns/$host/hosts"
    ip -n "$host" link set lo up
    links="data control"
    if [ "$how" = line ]; then
        links=control
        ip -n "$switch" link set "tap$i" netns "$host" name data mtu 65000
        ip -n "$host" link set data up
    fi
    for link in $links; do
        ip link add name "$link" netns "$host" type veth peer name "$link$i" netns "$switch"
        ip -n "$switch" link set "$link$i" master "$link" up
        ip -n "$host" link set "$link" up
    done
    ip -n "$host" addr add "10.89.0.$i/24" dev data
    ip -n "$host" addr add "10.90.0.$i/24" dev control
    tc -n "$host" qdisc add dev data root handle 1: tbf rate "$rate" burst 512kb latency 100ms
    if [ "$how" = netem ]; then
        tc -n "$host" qdisc add dev data parent 1:1 handle 10: netem delay "$delay" limit 100000
    fi
    i=$((i + 1))
done
"#;

/// Creates the hosts, prints `created` or the error, and removes the hosts when its standard input is closed.
const GUARD: &str = r#"
trap '' INT TERM HUP
create=$1 agent=$2
shift 2
if bash -euc "$create" create "$@" 2>&1 </dev/null; then
    echo created
    exec >/dev/null 2>&1
    cat
fi
exec >/dev/null 2>&1
switch=$1
shift 5
for host in "$@" "$switch"; do
    # Programs may still be starting other programs.
    for try in 1 2 3 4 5 6 7 8 9 10; do
        pids=$(ip netns pids "$host")
        [ -n "$pids" ] || break
        kill -9 $pids
        sleep 0.05
    done
    ip netns del "$host"
    rm -rf "/etc/netns/$host"
done
rm -f "$agent"
"#;

impl Network {
    /// Returns a command that runs on the first host.
    pub fn on_first_host(&self, program: &str) -> Command {
        let host = &self.names[0];
        let mut command = Command::new("ip");
        command.args([
            "netns",
            "exec",
            host,
            "unshare",
            "--uts",
            "sh",
            "-c",
            "hostname \"$0\"; exec \"$@\"",
            host,
            program,
        ]);
        command
    }

    /// The hosts' names. The addresses of their control links are 10.90.0.1, 10.90.0.2 and so on.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The path of a program that runs a command on a host, like `ssh`.
    pub fn agent(&self) -> &Path {
        &self.agent
    }

    /// Cuts all links of a host.
    pub fn cut(&self, host: usize) {
        self.set_links(host, "down");
    }

    /// Restores all links of a host.
    pub fn restore(&self, host: usize) {
        self.set_links(host, "up");
    }

    fn set_links(&self, host: usize, state: &str) {
        for link in ["data", "control"] {
            let status = Command::new("ip").args(["-n", &self.names[host], "link", "set", link, state]).status();
            assert!(status.is_ok_and(|status| status.success()), "the link {link} of host {host} is not {state}");
        }
    }

    /// Open MPI's network settings, as environment variables.
    pub fn mpi_settings(&self) -> Vec<(String, String)> {
        self.settings().into_iter().map(|(key, value)| (format!("OMPI_MCA_{key}"), value.to_string())).collect()
    }

    fn settings(&self) -> [(&'static str, &'static str); 3] {
        let transports = if self.hosts.ranks_per_host > 1 { "tcp,vader,self" } else { "tcp,self" };
        [("btl", transports), ("btl_tcp_if_include", "10.89.0.0/24"), ("oob_tcp_if_include", "10.90.0.0/24")]
    }

    /// The arguments of `mpirun` on the first host.
    pub(crate) fn mpirun_arguments(&self) -> Vec<String> {
        let slots: Vec<String> =
            self.names.iter().map(|name| format!("{name}:{}", self.hosts.ranks_per_host)).collect();
        let mut arguments = vec!["--host".to_string(), slots.join(",")];
        let agent = self.agent.to_string_lossy();
        for (key, value) in self.settings().into_iter().chain([("plm_rsh_agent", agent.as_ref())]) {
            arguments.extend(["--mca".to_string(), key.to_string(), value.to_string()]);
        }
        arguments
    }

    fn write_agent(&self) -> std::io::Result<()> {
        let mut file = std::fs::File::create(&self.agent)?;
        file.write_all(
            b"#!/bin/sh\nhost=$1\nshift\nexec ip netns exec \"$host\" unshare --uts sh -c \"hostname $host; $*\"\n",
        )?;
        file.set_permissions(std::fs::Permissions::from_mode(0o755))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        // If waiting fails, the guard still cleans up.
        drop(self.guard.wait());
    }
}
