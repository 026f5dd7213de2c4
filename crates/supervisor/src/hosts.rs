//! The hosts that ranks run on, and which of them can be reached.

use std::fmt;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::launcher_env::hostname;

/// How long a host may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

const POLL: Duration = Duration::from_millis(20);

/// A host that ranks can run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, as the launcher and the agent know it.
    pub name: String,
    /// The number of ranks that it has room for.
    pub ranks: usize,
}

impl FromStr for Host {
    type Err = String;

    /// Parses `NAME:RANKS`, or `NAME` for one rank.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ranks) = text.split_once(':').unwrap_or((text, "1"));
        // The name becomes an argument of other programs, so it may not look like an option.
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        match ranks.parse() {
            Ok(ranks @ 1..=1_000_000) if is_name && !name.starts_with('-') => {
                Ok(Host { name: name.to_string(), ranks })
            }
            _ => Err(format!("'{text}' is not a host: write NAME:RANKS, for example node1:8")),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.ranks)
    }
}

/// Returns the hosts on which `agent` can start a program, in the given order. All are tried at once.
pub(crate) fn reachable_hosts(hosts: &[Host], agent: &str) -> Vec<Host> {
    let own = hostname();
    let probe = |host: &Host| {
        let mut command = Command::new(agent);
        command.arg(&host.name).arg("true").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn()
    };
    let probes: Vec<_> = hosts.iter().map(|host| (host, (host.name != own).then(|| probe(host)))).collect();
    let deadline = Instant::now() + TIMEOUT;
    let answer = |(host, probe): (&Host, Option<std::io::Result<std::process::Child>>)| {
        let Some(probe) = probe else { return Some(host.clone()) };
        let mut child = probe.ok()?;
        while Instant::now() < deadline {
            if let Some(status) = child.try_wait().ok()? {
                return status.success().then(|| host.clone());
            }
            std::thread::sleep(POLL);
        }
        drop(child.kill());
        drop(child.wait());
        None
    };
    probes.into_iter().filter_map(answer).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn hosts_are_parsed_and_printed() {
        let host: Host = "node-1.site:8".parse().unwrap();
        assert_eq!((host.name.as_str(), host.ranks, host.to_string().as_str()), ("node-1.site", 8, "node-1.site:8"));
        assert_eq!("b".parse::<Host>().unwrap().ranks, 1);
        for wrong in ["", ":2", "a:0", "a:x", "-oProxyCommand=x:1", "a b:1", "a;b:1"] {
            assert!(wrong.parse::<Host>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn hosts_that_do_not_answer_are_left_out() {
        let hosts: Vec<Host> =
            [hostname().as_str(), "a", "b"].iter().map(|name| format!("{name}:2").parse().unwrap()).collect();
        assert_eq!(reachable_hosts(&hosts, "true"), hosts);
        assert_eq!(reachable_hosts(&hosts, "false"), hosts[..1]);
        assert_eq!(reachable_hosts(&hosts, "/nowhere/agent"), hosts[..1]);
    }
}
