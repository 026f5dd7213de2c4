//! Finds import cycles: which file uses items of which other file.
//!
//! A crate is parsed, not compiled: module declarations give the tree of files, and `use` declarations and paths give the edges. An
//! item used through a re-export counts as used from the file that defines it. Methods, trait implementations and declarative
//! macros are not followed, and code under `#[cfg(test)]` is ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A path of module names below a crate's root.
type ModulePath = Vec<String>;

#[derive(Default)]
struct Module {
    file: PathBuf,
    /// The names of the items that are defined here.
    items: BTreeSet<String>,
    children: BTreeSet<String>,
    /// `use` declarations: the name that each one binds, and the path behind it.
    bindings: BTreeMap<String, Vec<String>>,
    /// Paths of glob imports.
    globs: Vec<Vec<String>>,
    /// Every path that is mentioned, with its line.
    mentions: Vec<(Vec<String>, usize)>,
}

/// One use of another file's item.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    from: PathBuf,
    to: PathBuf,
    line: usize,
    path: String,
}

/// The import cycles of every crate of the workspace.
pub(super) fn find_cycles(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for crate_root in crate_roots(root)? {
        found.extend(
            cycles_of_crate(&crate_root)?.into_iter().map(|line| line.replace(&format!("{}/", root.display()), "")),
        );
    }
    Ok(found)
}

/// The root files of all library and binary targets.
fn crate_roots(root: &Path) -> Result<Vec<PathBuf>> {
    let mut roots = Vec::new();
    let outside = ["xtask", "bench", "bench/compare", "docs/drawings", "fuzz", "tests/harness", "tests/pretend-device"];
    let mut folders: Vec<PathBuf> = outside.iter().map(|folder| root.join(folder)).collect();
    for entry in std::fs::read_dir(root.join("crates"))? {
        folders.push(entry?.path());
    }
    for folder in folders {
        for name in ["lib.rs", "main.rs"] {
            let file = folder.join("src").join(name);
            if file.exists() {
                roots.push(file);
            }
        }
        let programs = folder.join("src/bin");
        if !programs.exists() {
            continue;
        }
        for entry in std::fs::read_dir(programs)? {
            let path = entry?.path();
            let file = if path.is_dir() { path.join("main.rs") } else { path };
            if file.exists() && file.extension().is_some_and(|extension| extension == "rs") {
                roots.push(file);
            }
        }
    }
    roots.sort();
    Ok(roots)
}

/// The import cycles of the crate with this root file, one message per cycle.
pub(super) fn cycles_of_crate(root_file: &Path) -> Result<Vec<String>> {
    let mut modules = BTreeMap::new();
    parse_file(root_file, Vec::new(), &mut modules)?;
    let edges = edges_of(&modules);
    let files: BTreeSet<&Path> = modules.values().map(|module| module.file.as_path()).collect();
    let mut messages = Vec::new();
    for cycle in strongly_connected(&files, &edges) {
        let inside: Vec<&Edge> =
            edges.iter().filter(|edge| cycle.contains(&*edge.from) && cycle.contains(&*edge.to)).collect();
        let names: Vec<String> = cycle.iter().map(|file| file.display().to_string()).collect();
        let mut message = format!("cycle of {} files: {}", names.len(), names.join(", "));
        // One use of each file by another is enough to find the others.
        let mut shown = BTreeSet::new();
        for edge in inside.into_iter().filter(|edge| shown.insert((&edge.from, &edge.to))) {
            message += &format!("\n            {}:{}: uses {}", edge.from.display(), edge.line, edge.path);
        }
        messages.push(message);
    }
    Ok(messages)
}

fn parse_file(file: &Path, path: ModulePath, modules: &mut BTreeMap<ModulePath, Module>) -> Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let parsed = syn::parse_file(&text).with_context(|| file.display().to_string())?;
    parse_items(file, &parsed.items, path, modules)
}

fn parse_items(
    file: &Path,
    items: &[syn::Item],
    path: ModulePath,
    modules: &mut BTreeMap<ModulePath, Module>,
) -> Result<()> {
    let mut module = Module { file: file.to_path_buf(), ..Module::default() };
    for item in items.iter().filter(|item| !is_test(attributes_of(item))) {
        if let Some(name) = name_of(item) {
            module.items.insert(name);
        }
        match item {
            syn::Item::Use(item) => {
                let mentions = module.mentions.len();
                collect_uses(&item.tree, &mut Vec::new(), &mut module, item.span().start().line);
                // A re-export is not a use: whoever names it uses the file behind it.
                if !matches!(item.vis, syn::Visibility::Inherited) {
                    module.mentions.truncate(mentions);
                }
            }
            syn::Item::Mod(item) => {
                let name = item.ident.to_string();
                module.children.insert(name.clone());
                let child = [path.clone(), vec![name.clone()]].concat();
                match &item.content {
                    Some((_, items)) => parse_items(file, items, child, modules)?,
                    None => parse_file(&file_of_module(file, &path, &name)?, child, modules)?,
                }
            }
            other => Mentions { module: &mut module }.visit_item(other),
        }
    }
    modules.insert(path, module);
    Ok(())
}

/// The file that `mod name;` in `file` refers to.
fn file_of_module(file: &Path, path: &ModulePath, name: &str) -> Result<PathBuf> {
    let folder = file.parent().context("a file is in a folder")?;
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let folder = match path.is_empty() || stem == "mod" {
        true => folder.to_path_buf(),
        false => folder.join(stem),
    };
    let candidates = [folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")];
    let found = candidates.iter().find(|candidate| candidate.exists());
    found.cloned().with_context(|| format!("{}: no file for mod {name}", file.display()))
}

/// Collects the paths that code mentions.
struct Mentions<'a> {
    module: &'a mut Module,
}

impl<'ast> Visit<'ast> for Mentions<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.module.mentions.push((segments, path.span().start().line));
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        collect_uses(&item.tree, &mut Vec::new(), self.module, item.span().start().line);
    }
}

fn collect_uses(tree: &syn::UseTree, prefix: &mut Vec<String>, module: &mut Module, line: usize) {
    match tree {
        syn::UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            collect_uses(&path.tree, prefix, module, line);
            prefix.pop();
        }
        syn::UseTree::Name(name) if name.ident == "self" => {
            let bound = prefix.last().cloned().unwrap_or_default();
            module.bindings.insert(bound, prefix.clone());
            module.mentions.push((prefix.clone(), line));
        }
        syn::UseTree::Name(name) => bind(name.ident.to_string(), name.ident.to_string(), prefix, module, line),
        syn::UseTree::Rename(rename) => {
            bind(rename.rename.to_string(), rename.ident.to_string(), prefix, module, line);
        }
        syn::UseTree::Glob(_) => module.globs.push(prefix.clone()),
        syn::UseTree::Group(group) => {
            group.items.iter().for_each(|tree| collect_uses(tree, prefix, module, line));
        }
    }
}

fn bind(bound: String, name: String, prefix: &[String], module: &mut Module, line: usize) {
    let path = [prefix, &[name]].concat();
    module.bindings.insert(bound, path.clone());
    module.mentions.push((path, line));
}

fn edges_of(modules: &BTreeMap<ModulePath, Module>) -> BTreeSet<Edge> {
    let mut edges = BTreeSet::new();
    for (path, module) in modules {
        for (mention, line) in &module.mentions {
            let Some(to) = resolve(modules, path, mention, 0) else { continue };
            if to != module.file {
                edges.insert(Edge { from: module.file.clone(), to, line: *line, path: mention.join("::") });
            }
        }
    }
    edges
}

/// The file that defines what `mention` names, seen from the module `from`. `None` if that is outside of the crate.
fn resolve(
    modules: &BTreeMap<ModulePath, Module>,
    from: &ModulePath,
    mention: &[String],
    depth: usize,
) -> Option<PathBuf> {
    // Chains of re-exports normally end; the limit is for those that form a cycle.
    if depth > 20 {
        return None;
    }
    let (mut at, rest) = match mention.first()?.as_str() {
        "crate" => (Vec::new(), &mention[1..]),
        "self" => (from.clone(), &mention[1..]),
        "super" => {
            let ups = mention.iter().take_while(|segment| *segment == "super").count();
            (from[..from.len().checked_sub(ups)?].to_vec(), &mention[ups..])
        }
        first => {
            let module = &modules[from];
            let known =
                module.children.contains(first) || module.items.contains(first) || module.bindings.contains_key(first);
            // It is the name of another crate, of std, or of a local variable.
            if !known {
                return None;
            }
            (from.clone(), mention)
        }
    };
    for (index, segment) in rest.iter().enumerate() {
        let module = modules.get(&at)?;
        if module.children.contains(segment) {
            at.push(segment.clone());
            continue;
        }
        if module.items.contains(segment) {
            return Some(module.file.clone());
        }
        if let Some(path) = module.bindings.get(segment) {
            // The path may leave the crate, as in `use shardwise_comm as comm`, or lead back here, as in `use self::a::b`.
            let path = [path.as_slice(), &rest[index + 1..]].concat();
            return resolve(modules, &at, &path, depth + 1);
        }
        let remaining = &rest[index..];
        return module
            .globs
            .iter()
            .find_map(|glob| resolve(modules, &at, &[glob.as_slice(), remaining].concat(), depth + 1));
    }
    // The path names a module as a whole. Only paths that go through a module to an item count.
    None
}

/// The strongly connected components of at least two files. They are computed by definition, without Tarjan's algorithm, because
/// there are few files.
fn strongly_connected<'a>(files: &BTreeSet<&'a Path>, edges: &BTreeSet<Edge>) -> Vec<BTreeSet<&'a Path>> {
    let reached = |start: &'a Path| {
        let mut seen: BTreeSet<&Path> = BTreeSet::new();
        let mut open = vec![start];
        while let Some(file) = open.pop() {
            for edge in edges.iter().filter(|edge| edge.from == file) {
                let to = files.get(&*edge.to).copied().unwrap_or(file);
                if seen.insert(to) {
                    open.push(to);
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&Path, BTreeSet<&Path>> = files.iter().map(|&file| (file, reached(file))).collect();
    let mut groups: Vec<BTreeSet<&Path>> = Vec::new();
    for &file in files {
        if groups.iter().any(|group| group.contains(file)) {
            continue;
        }
        let mutual = |other: &&&Path| reach[file].contains(**other) && reach[**other].contains(file);
        let group: BTreeSet<&Path> = files.iter().filter(mutual).copied().collect();
        if group.len() > 1 {
            groups.push(group);
        }
    }
    groups
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let mut test = false;
        if attribute.path().is_ident("cfg") {
            // Errors are ignored: an attribute that does not parse like `cfg(test)` is not a test.
            drop(attribute.parse_nested_meta(|meta| {
                test |= meta.path.is_ident("test");
                Ok(())
            }));
        }
        test
    })
}

fn attributes_of(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn name_of(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    fn crate_of(files: &[(&str, &str)]) -> Vec<String> {
        let folder =
            std::env::temp_dir().join(format!("tidy-{}-{:?}", std::process::id(), std::thread::current().id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let found = cycles_of_crate(&folder.join("lib.rs")).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        found
    }

    #[test]
    fn a_planted_cycle_is_reported_with_its_imports() {
        let found = crate_of(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B;\npub struct A(B);"),
            ("b.rs", "pub struct B;\nfn f(_: crate::a::A) {}"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("a.rs:1: uses crate::b::B"), "{found:?}");
        assert!(found[0].contains("b.rs:2: uses crate::a::A"), "{found:?}");
    }

    #[test]
    fn a_cycle_through_a_re_export_is_reported() {
        let found = crate_of(&[
            ("lib.rs", "mod a; mod b; pub use a::A;"),
            ("a.rs", "use crate::b::B;\npub struct A(B);"),
            ("b.rs", "pub struct B;\nuse crate::A as Other;\nfn f(_: Other) {}"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn a_chain_and_tests_are_no_cycle() {
        let found = crate_of(&[
            ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;"),
            ("a.rs", "use crate::b::B;\npub struct A(B);"),
            ("b.rs", "pub struct B;\n#[cfg(test)]\nmod tests { use crate::a::A; }"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }
}
