//! Page with any number of results.

mod benches;
mod compare;
mod migration;
mod others;

use super::html::Page;
use super::input::Found;
use super::migration::Migration;
use crate::json::Document;

/// Result with its name on the page.
#[derive(Debug, Clone)]
struct Named<T> {
    name: String,
    result: T,
}

/// Returns an HTML page that displays `results`, each with the name of its file.
pub fn page(results: Vec<(String, Found)>) -> String {
    let (mut migrations, mut benches) = (Vec::new(), Vec::new());
    for (name, found) in results {
        match found {
            Found::Migration(migration) => take(&mut migrations, name, *migration),
            Found::Bench(result) => benches.push(Named { name, result: *result }),
        }
    }
    number(&mut migrations);
    number(&mut benches);
    let mut page = Page::new(&title(&migrations, &benches));
    if migrations.len() > 1 {
        page.part("Migrations compared");
        compare::migrations(&mut page, &migrations);
    }
    for migration in &migrations {
        page.part(&format!("Migration {}", migration.name));
        migration::section(&mut page, &migration.result);
    }
    for (kind, own) in by_kind(&benches) {
        if own.len() > 1 {
            page.part(&format!("Runs of bench {kind} compared"));
            compare::benches(&mut page, &own);
        }
        for bench in own {
            page.part(&format!("Bench {kind}: {}", bench.name));
            benches::section(&mut page, &bench.result);
        }
    }
    page.finish()
}

/// Adds a migration, or merges it with its own recording: the files of `--json` and `--events` of
/// one migration are one result.
fn take(migrations: &mut Vec<Named<Migration>>, name: String, migration: Migration) {
    let same = |known: &&mut Named<Migration>| !migration.id.is_empty() && known.result.id == migration.id;
    let Some(known) = migrations.iter_mut().find(same) else {
        migrations.push(Named { name, result: migration });
        return;
    };
    // Keep the document with more values, and take the samples of the other one if it has none.
    let (mut keep, rest) = if migration.everything.len() > known.result.everything.len() {
        (migration, std::mem::take(&mut known.result))
    } else {
        (std::mem::take(&mut known.result), migration)
    };
    if keep.samples.is_empty() {
        keep.samples = rest.samples;
    }
    if keep.speed.len() < rest.speed.len() {
        keep.speed = rest.speed;
    }
    known.result = keep;
    if !known.name.contains(&name) {
        known.name = format!("{} + {name}", known.name);
    }
}

/// Numbers the results of one file.
fn number<T>(results: &mut [Named<T>]) {
    let names: Vec<String> = results.iter().map(|own| own.name.clone()).collect();
    for (index, own) in results.iter_mut().enumerate() {
        if names.iter().filter(|name| **name == own.name).count() > 1 {
            let before = names[..index].iter().filter(|name| **name == own.name).count();
            own.name = format!("{} #{}", own.name, before + 1);
        }
    }
}

fn title(migrations: &[Named<Migration>], benches: &[Named<Document>]) -> String {
    let plural = |count: usize, what: &str| match count {
        0 => None,
        1 => Some(format!("a {what}")),
        count => Some(format!("{count} {what}s")),
    };
    let runs = plural(benches.len(), "bench run");
    let parts: Vec<String> = [plural(migrations.len(), "migration"), runs].into_iter().flatten().collect();
    format!("vmferry: {}", parts.join(" and "))
}

/// Returns the runs of each bench, in the order of the first run of each bench.
fn by_kind(benches: &[Named<Document>]) -> Vec<(&str, Vec<&Named<Document>>)> {
    let mut kinds: Vec<(&str, Vec<&Named<Document>>)> = Vec::new();
    for bench in benches {
        match kinds.iter_mut().find(|(kind, _)| *kind == bench.result.bench) {
            Some((_, own)) => own.push(bench),
            None => kinds.push((&bench.result.bench, vec![bench])),
        }
    }
    kinds
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
