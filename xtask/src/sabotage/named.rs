//! Whether what `docs/guarantees.md` names is there: a test that was renamed must not leave a promise without proof.

use std::path::Path;

/// The words in backticks.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The text of every Rust file below a directory, build results left out.
fn sources(dir: &Path, text: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                sources(&path, text);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

fn is_guarantee(word: &str) -> bool {
    let number = word
        .strip_prefix('g')
        .and_then(|rest| rest.split(['_', '-']).next());
    // `g2_…` names all of them.
    word.is_ascii() && number.is_some_and(|number| number.parse::<u8>().is_ok())
}

#[test]
fn every_test_and_patch_that_the_guarantees_name_is_there() {
    let root = crate::workspace();
    let doc = std::fs::read_to_string(root.join("docs/guarantees.md")).unwrap();
    let mut all = String::new();
    sources(&root, &mut all);
    let named: Vec<&str> = code(&doc).filter(|word| is_guarantee(word)).collect();
    let (patches, tests): (Vec<&str>, Vec<&str>) =
        named.iter().partition(|word| word.contains('-'));
    assert!(
        patches.len() > 20 && tests.len() > 50,
        "the page reads otherwise"
    );
    for test in tests {
        assert!(
            all.contains(&format!("fn {test}(")) || all.contains(&format!("fn {test}<")),
            "no test {test}"
        );
    }
    for patch in patches {
        let file = root.join(format!("sabotage/{patch}.patch"));
        assert!(file.exists(), "no patch {patch}");
    }
}
