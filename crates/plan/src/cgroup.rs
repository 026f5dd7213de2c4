//! The memory that cgroups allow a process.

use std::iter::successors;
use std::path::Path;

const V1_ROOT: &str = "/sys/fs/cgroup/memory";
const V2_ROOT: &str = "/sys/fs/cgroup";

/// The lowest memory limit of the cgroups that `process`, the caller, is in, in bytes, for one of `ranks_here` ranks: they share the limits
/// of all cgroups, except of one in which the process is alone. `read` returns the contents of a file.
pub fn cgroup_memory_limit(process: u32, ranks_here: usize, read: impl Fn(&str) -> Option<String>) -> Option<usize> {
    // Containers may hide it, and still have a limit.
    let groups = read("/proc/self/cgroup").unwrap_or_else(|| "0::/\n1:memory:/\n".to_string());
    let of_file = |(root, name, path): (&str, &str, &str)| {
        let file =
            |group: &Path, name: &str| read(&format!("{root}{}/{name}", group.to_string_lossy().trim_end_matches('/')));
        let limit = |group: &Path| -> Option<usize> {
            let bytes: usize = file(group, name)?.trim().parse().ok()?;
            let is_alone = file(group, "cgroup.procs").is_some_and(|all| all.trim() == process.to_string());
            // A cgroup's list does not contain the processes of the cgroups inside it.
            Some(if is_alone && group == Path::new(path) { bytes } else { bytes / ranks_here.max(1) })
        };
        successors(Some(Path::new(path)), |group| group.parent()).filter_map(limit).min()
    };
    memory_groups(&groups).filter_map(of_file).min()
}

/// The folder of a hierarchy, the name of the file with the limit, and the path of the process's cgroup.
fn memory_groups(groups: &str) -> impl Iterator<Item = (&'static str, &'static str, &str)> {
    groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        match controllers {
            "" => Some((V2_ROOT, "memory.max", path)),
            _ if controllers.split(',').any(|controller| controller == "memory") => {
                Some((V1_ROOT, "memory.limit_in_bytes", path))
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn limit(groups: &str, files: &[(&str, &str)], ranks_here: usize) -> Option<usize> {
        let files = [&[("/proc/self/cgroup", groups)], files].concat();
        cgroup_memory_limit(42, ranks_here, |path: &str| {
            let found = files.iter().find(|(name, _)| *name == path);
            found.map(|(_, text)| format!("{text}\n"))
        })
    }

    #[test]
    fn the_lowest_limit_of_a_cgroup_and_those_around_it_counts() {
        let slurm = "4:memory:/slurm/job_7/step_0\n0::/\n";
        let files = [
            ("/sys/fs/cgroup/memory/slurm/job_7/step_0/memory.limit_in_bytes", "9223372036854771712"),
            ("/sys/fs/cgroup/memory/slurm/job_7/step_0/cgroup.procs", "42\n43"),
            ("/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "6442450944"),
        ];
        assert_eq!(limit(slurm, &files, 2), Some(3 * GIB));
        // Version 2, with nothing but the host's root.
        assert_eq!(limit("0::/\n", &[], 2), None);
        assert_eq!(limit("0::/job\n", &[("/sys/fs/cgroup/job/memory.max", "max")], 2), None);
        assert_eq!(limit("0::/\n", &[("/sys/fs/cgroup/memory.max", "4294967296")], 4), Some(GIB));
    }

    #[test]
    fn a_rank_does_not_share_a_cgroup_of_its_own() {
        let file = "/sys/fs/cgroup/job/rank-1/memory.max";
        let files = [(file, "3221225472"), ("/sys/fs/cgroup/job/rank-1/cgroup.procs", "42")];
        assert_eq!(limit("0::/job/rank-1\n", &files, 2), Some(3 * GIB));
        assert_eq!(limit("0::/job/rank-1\n", &files[..1], 2), Some(3 * GIB / 2));
    }

    #[test]
    fn a_container_that_hides_the_cgroups_has_the_limit_of_the_root() {
        let read = |path: &str| (path == "/sys/fs/cgroup/memory.max").then(|| "1073741824\n".to_string());
        assert_eq!(cgroup_memory_limit(42, 1, read), Some(GIB));
    }
}
