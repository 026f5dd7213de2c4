//! The processes of a run.

use std::path::Path;

/// Returns the process ids of the ranks that run a recipe.
pub fn rank_pids(recipe: &Path) -> Vec<u32> {
    let recipe = recipe.to_string_lossy();
    let is_rank = |id: &u32| {
        // The launcher's command line contains the recipe too.
        let name = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        let arguments = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        name.trim() == "shardwise-rank" && String::from_utf8_lossy(&arguments).contains(&*recipe)
    };
    let names = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).filter(is_rank).collect()
}
